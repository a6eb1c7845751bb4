"""The Triton kernels of quantise and dequantise give the reference's bits: interpreted on a CPU, compiled on a GPU.

Triton has to be told to interpret before it is first imported, so on a CPU `test_in_the_interpreter.py` runs this file.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from caramba.ops.formats import NF4_LEVELS, STORED, reference_dequantize, reference_quantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
runs = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="runs in the interpreter's process")


def hard_rows(width: int) -> Tensor:
    """Rows of every scale, with ties, zeros, infinities and NaNs."""
    x = torch.randn(41, width, generator=torch.Generator().manual_seed(width))
    x = x * torch.logspace(-7, 4, 41)[:, None]
    x[0], x[1, ::2], x[2, -1] = 0, float("nan"), float("inf")
    x[3, 0] = -float("inf")
    x[4] = (torch.arange(width) % 17 - 8) * 0.25  # exact steps, and -2 and 2 of one magnitude
    x[5] = (8 - torch.arange(width) % 17) * 0.25
    return x


def same(got: Tensor, wanted: Tensor) -> None:
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    torch.testing.assert_close(got.cpu(), wanted, rtol=0, atol=0, equal_nan=True)


@runs
@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("width", [1, 32, 48, 200])
def test_codes_scales_and_numbers_are_the_references(kind: str, width: int) -> None:
    from caramba.kernels.triton.dequantize import dequantize
    from caramba.kernels.triton.quantize import quantize

    for dtype in DTYPES:
        x = hard_rows(width).to(dtype)
        wanted = reference_quantize(x, kind)
        got = quantize(x.to(DEVICE), kind)
        for mine, theirs in zip(got, wanted, strict=True):
            same(mine, theirs)
        same(dequantize(*got, kind, width, dtype), reference_dequantize(*wanted, kind, width, dtype))


@runs
@pytest.mark.parametrize("kind", STORED)
def test_a_caches_strides_and_empty_rows(kind: str) -> None:
    from caramba.kernels.triton.dequantize import dequantize
    from caramba.kernels.triton.quantize import quantize

    x = torch.randn(2, 7, 130, generator=torch.Generator().manual_seed(0))
    codes, scales = quantize(x.transpose(0, 1).to(DEVICE).contiguous().transpose(0, 1), kind)
    wanted = reference_dequantize(*reference_quantize(x, kind), kind, 130, torch.float32)
    lanes = codes.transpose(1, 2).contiguous()[:, :, :5].transpose(1, 2)
    strided = scales.transpose(1, 2).contiguous()[:, :, :5].transpose(1, 2)
    same(dequantize(lanes, strided, kind, 130, torch.float32), wanted[:, :5])
    empty = quantize(x[:, :0].to(DEVICE), kind)
    assert dequantize(*empty, kind, 130, torch.float16).shape == (2, 0, 130)


def test_the_kernels_know_the_formats() -> None:
    pytest.importorskip("triton")
    from caramba.kernels.triton import block_tables

    assert tuple(block_tables.nf4_levels().tolist()) == tuple(torch.tensor(NF4_LEVELS).tolist())
    for kind, stored in STORED.items():
        own = block_tables.BLOCKS[kind]
        assert (own.elements, own.code_width) == (stored.block.elements, stored.code_width)
        assert (own.code_dtype, own.scale_dtype) == (stored.code_dtype, stored.scale_dtype)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("kind", STORED)
def test_the_ops_run_the_kernels_on_a_gpu(kind: str) -> None:
    from caramba import kernels, ops

    attached = kernels.load("cuda")
    assert attached["quantize"] == attached["dequantize"] == "triton"
    x = torch.randn(4096, 512, device="cuda", dtype=torch.bfloat16)
    codes, scales = ops.quantize(x, kind)
    wanted = reference_quantize(x.cpu(), kind)
    same(codes, wanted[0])
    same(scales, wanted[1])
    back = ops.dequantize(codes, scales, kind, 512, torch.bfloat16)
    same(back, reference_dequantize(*wanted, kind, 512, torch.bfloat16))
