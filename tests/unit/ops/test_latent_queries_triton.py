"""The Triton kernels of latent queries against float64: on a GPU in both dtypes and at the widths of the presets,
without one in Triton's interpreter, by `tests/ops/test_units_in_the_interpreter.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caramba.ops.latent_queries import latent_queries, reference_latent_queries
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
CASES = [(2, 70, 3, 6, 4), (1, 130, 2, 64, 64), (2, 33, 2, 24, 80)]
LARGE = [(8, 2048, 32, 64, 64), (2, 1111, 32, 64, 256), (1, 5000, 3, 128, 256)] if HAS_GPU else []


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("latent_queries")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("shape", [*CASES, *LARGE])
def test_kernels_against_float64(shape: tuple[int, int, int, int, int], per_row: bool, dtype: torch.dtype) -> None:
    batch, n_tokens, heads, width, geo = shape
    q = drawn(batch, n_tokens, heads, width, dtype=dtype).requires_grad_()
    geo_map = (drawn(heads, width, geo, seed=1) * width**-0.5).requires_grad_()
    angles = drawn(*((batch, 1) if per_row else (1,)), n_tokens, geo // 2, seed=2) * 3
    # Attention gives the gradient in the order of heads or of tokens.
    grad = drawn(batch, heads, n_tokens, width + geo, seed=3, dtype=dtype).transpose(1, 2)
    if per_row:
        grad = grad.contiguous()
    y = latent_queries(q, geo_map, angles.cos(), angles.sin(), 0.125)
    got = [y, *torch.autograd.grad(y, (q, geo_map), grad)]
    # What the kernel rounds before its product, the map, is rounded here too.
    wide = [q.detach().double().requires_grad_(), geo_map.detach().to(dtype).double().requires_grad_()]
    table = angles.double()
    want_y = reference_latent_queries(*wide, table.cos(), table.sin(), 0.125)
    want = [want_y, *torch.autograd.grad(want_y, wide, grad.double())]
    assert [x.dtype for x in got] == [dtype, dtype, torch.float32]
    eps = torch.finfo(dtype).eps
    for ours, wanted in zip(got, want, strict=True):
        assert ours.shape == wanted.shape
        assert ours.is_contiguous()
        # Gradients pass products whose factors, turned gradients, are rounded once.
        bound = 2 * eps * wanted.abs() + eps * wanted.std() * (ours is not y) + 2e-5 * wanted.abs().amax()
        worst = ((ours.double() - wanted).abs() / bound).amax()
        assert worst <= 1, f"{tuple(ours.shape)}: error is {float(worst):.2f} of the bound"


def test_other_dtypes_run_the_reference() -> None:
    q, geo_map = drawn(1, 4, 2, 6, dtype=torch.float64), drawn(2, 6, 4, dtype=torch.float64)
    angles = drawn(1, 4, 2, dtype=torch.float64)
    rest = (geo_map, angles.cos(), angles.sin(), 0.3)
    assert torch.equal(latent_queries(q, *rest), reference_latent_queries(q, *rest))
    none = latent_queries(q[:0].to(torch.float16).requires_grad_(), geo_map.requires_grad_(), *rest[1:])
    assert none.shape == (0, 4, 2, 10)
    assert not torch.autograd.grad(none.sum(), geo_map)[0].any()
