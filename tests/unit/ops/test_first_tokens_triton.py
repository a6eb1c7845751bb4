"""The Triton kernels of exact first tokens against float64: on a GPU in both dtypes and at the widths of the presets,
without one in Triton's interpreter, by `tests/ops/test_units_in_the_interpreter.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caramba.ops.first_tokens import first_tokens, reference_first_tokens, reference_first_tokens_backward
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
CASES = [(2, 4, 2, 70, 4, 64), (1, 3, 3, 33, 1, 24), (1, 2, 1, 5, 5, 128)]
LARGE = [(8, 9, 3, 2048, 4, 64), (2, 32, 8, 1111, 16, 128)] if HAS_GPU else []


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("first_tokens")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
@pytest.mark.parametrize("shape", [*CASES, *LARGE])
def test_kernels_against_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    batch, heads, groups, length, n, width = shape
    # As a layer gives them: the first part of queries that lie side by side, [B, T, H, 2 D].
    joined = drawn(batch, length, heads, 2 * width, dtype=dtype) * width**-0.25
    q = joined.transpose(1, 2)[..., :width].requires_grad_()
    k, v = (drawn(batch, groups, n, width, seed=seed, dtype=dtype).requires_grad_() for seed in (1, 2))
    mean = (drawn(groups, width, seed=3) * 0.3).requires_grad_()
    angles = drawn(1, length, width // 2, seed=4) * 3
    grads = drawn(batch, heads, length, width, seed=5, dtype=dtype), drawn(batch, heads, length, 1, seed=6)
    out, lse = first_tokens(q, k, v, mean, angles.cos(), angles.sin())
    got = [out, lse, *torch.autograd.grad((out, lse), (q, k, v, mean), grads)]
    wide = [x.detach().double() for x in (q, k, v, mean)]
    table = angles.double()
    q64, k64, v64, mean64 = wide
    found = reference_first_tokens(q64, k64, v64, mean64, table.cos(), table.sin())
    doubles = [x.double() for x in grads]
    want = [*found, *reference_first_tokens_backward(*doubles, *wide, table.cos(), table.sin(), found[1])]
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, dtype, dtype, torch.float32]
    eps = torch.finfo(dtype).eps
    for name, ours, wanted in zip(("out", "lse", "q", "k", "v", "mean"), got, want, strict=True):
        assert ours.shape == wanted.shape
        bound = (eps if ours.dtype == dtype else 1e-5) * wanted.abs() + 2e-5 * wanted.abs().amax()
        worst = ((ours.double() - wanted).abs() / bound).amax()
        assert worst <= 1, f"{name}: error is {float(worst):.2f} of the bound"


def test_other_dtypes_run_the_reference() -> None:
    q, k, mean = (drawn(*shape, dtype=torch.float64) for shape in ((1, 2, 3, 4), (1, 1, 2, 4), (1, 4)))
    angles = drawn(1, 3, 2, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    got, want = first_tokens(q, k, k, mean, cos, sin), reference_first_tokens(q, k, k, mean, cos, sin)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True)) or not HAS_GPU
