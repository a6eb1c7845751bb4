"""Queries that the latent's kernel in CUDA C++ lays out for its products, emulated on this host, number by number."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.emulated import MODES, EmulatedKernel, needs_compiler

latent = importlib.import_module("caramba.kernels.cuda.latent")
pytestmark = needs_compiler
SOURCE = Path(__file__).parent / "warp_emulator" / "laid_out.cu"
SHIFTS = {"q8_0": 7, "q4_0": 3, "nf4": 2}
"""Powers of two that codes are divided by."""


def order(kind: str, width: int) -> Tensor:
    """Return the feature of each number [product, half of it, lane of four, first or second]."""
    fields = latent.FIELDS[kind]
    chunks, halves = width // (8 * fields), fields // 2
    piece = 2 if chunks < 4 else 4  # words of a chunk that a lane makes keys of at a time
    step, half, j, which = torch.meshgrid(*map(torch.arange, (width // 16, 2, 4, 2)), indexing="ij")
    word, odd = step // halves, step % halves
    lanes = 4 // piece  # that share a chunk
    chunk, within = word // piece * piece + j // lanes, j % lanes * piece + word % piece
    unit = 2 * within + which
    if kind == "q8_0":
        return 16 * chunk + 2 * unit + half
    blocks = {"q4_0": 1, "nf4": 2}[kind]  # chunks of a block, in whose bytes are features half a block apart
    byte = chunk % blocks * 16 + 2 * unit + odd
    return chunk // blocks * 32 * blocks + byte + half * 16 * blocks


def lines(q: Tensor, kind: str, rows: int) -> Tensor:
    """Return queries [rows, width] as they lie: [product, half, row, eight numbers]."""
    features = order(kind, q.shape[1])
    assert features.flatten().sort().values.equal(torch.arange(q.shape[1]))
    return q[:, features].permute(1, 2, 0, 3, 4).reshape(-1, 2, rows, 8)


def lay_out(
    kinds: tuple[str, str], dims: tuple[int, int], q: list[Tensor], rows: int, warps: int, first: int = 0, mode: int = 0
) -> tuple[list[Tensor], float]:  # fmt: skip
    """Return what the kernel makes of queries [heads, queries, width] of both streams, and its power of two."""
    heads, queries, _ = q[0].shape
    way = latent.LatentConfig(rows=rows, warps=warps, stages=(1, 1))
    macros: dict[str, Any] = latent.macros(
        kinds, dims, way, group=heads, queries=queries, has_window=False, final=False,
        in_bf16=q[0].dtype == torch.bfloat16,
    )  # fmt: skip
    out, unit = np.zeros(rows * sum(dims) // 2, np.uint32), np.zeros(1, np.float32)
    bits = [x.view(torch.int16).numpy() for x in q]
    strides = [s for x in q for s in x.stride()[:2]]
    kernel = EmulatedKernel(SOURCE, "laid_out", macros)
    kernel((1, 1), 32 * warps, macros["SHARED_BYTES"], [out, unit, *bits, *strides, first], mode)
    parts = np.split(out.view(np.int16), [rows * dims[0]])
    found = [torch.from_numpy(x.copy()).view(torch.float16).reshape(-1, 2, rows, 8) for x in parts]
    return found, float(unit[0])


@pytest.mark.parametrize(
    ("kinds", "dims", "rows", "warps"),
    [
        (("q4_0", "q8_0"), (128, 256), 32, 8),
        (("q8_0", "q8_0"), (128, 64), 16, 8),
        (("q4_0", "nf4"), (64, 128), 32, 4),
        (("nf4", "q4_0"), (64, 64), 32, 12),
        (("q8_0", "q4_0"), (32, 128), 32, 16),
        (("nf4", "nf4"), (256, 256), 16, 4),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**-20])
def test_every_number_is_where_products_read_it(
    kinds: tuple[str, str], dims: tuple[int, int], rows: int, warps: int, dtype: torch.dtype, scale: float
) -> None:
    """The largest is 128 to 256 times its stream's power of two, and no number is rounded but those too small."""
    generator = torch.Generator().manual_seed(sum(dims))
    q = [(torch.randn(rows, 1, d, generator=generator) * scale).to(dtype) for d in dims]
    found, unit = lay_out(kinds, dims, q, rows, warps)
    largest = max(float(x.abs().max()) for x in q)
    assert unit == 2.0 ** math.floor(math.log2(largest))
    for x, kind, laid in zip(q, kinds, found, strict=True):
        wanted = x[:, 0].double() * (128 / unit * 2 ** SHIFTS[kind])
        torch.testing.assert_close(laid, lines(wanted.to(laid.dtype), kind, rows), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_queries_of_heads(mode: int) -> None:
    """Of a block that is not the first, heads and queries with places between them, and rows that there are none of."""
    held = [torch.randn(6, 5, d, generator=torch.Generator().manual_seed(d)).bfloat16() for d in (64, 128)]
    q = [x[:, :4] for x in held]
    found, unit = lay_out(("q8_0", "q4_0"), (64, 128), q, 16, 4, first=16, mode=mode)
    for x, kind, laid in zip(q, ("q8_0", "q4_0"), found, strict=True):
        rows = torch.cat([x.reshape(24, -1)[16:], x.new_zeros(8, x.shape[-1])]).double()
        wanted = (rows * (128 / unit * 2 ** SHIFTS[kind])).half()
        torch.testing.assert_close(laid, lines(wanted, kind, 16), rtol=0, atol=0)


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 31, 127), (1, 7, 64), (0, 16, 33)])
def test_one_power_of_two_is_for_all_queries(where: tuple[int, int, int]) -> None:
    """Of the largest in absolute value, whichever stream, row and feature it is; what is no number is none."""
    stream, row, feature = where
    q = [torch.full((32, 1, 128), -1.5, dtype=torch.bfloat16) for _ in range(2)]
    q[stream][row, 0, feature] = -100.0
    q[1 - stream][3, 0, 5] = torch.nan
    _, unit = lay_out(("q8_0", "q8_0"), (128, 128), q, 32, 8)
    assert unit == 64.0
    for far, wanted in ((2.0**-80, 2.0**-64), (2.0**127, 2.0**126)):
        _, unit = lay_out(("q8_0", "q8_0"), (128, 128), [torch.full_like(x, far) for x in q], 32, 8)
        assert unit == wanted
