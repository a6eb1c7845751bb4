"""The Triton kernels of a step's products of heads against float64: on a GPU in both dtypes and at the widths of the
presets, without one in Triton's interpreter, by `tests/ops/test_units_in_the_interpreter.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caramba.ops import backend
from caramba.ops.absorbed_step import absorbed_queries, reference_absorbed_queries
from caramba.ops.small_batch_linear import per_head_linear, reference_per_head_linear
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
# Sequences, tokens, heads, features of a head, of the latent, of the geometric part.
CASES = [(1, 1, 3, 6, 10, 4), (65, 1, 2, 24, 32, 16), (33, 1, 2, 64, 128, 64), (3, 7, 2, 24, 130, 80)]
LARGE = [(32, 1, 32, 64, 128, 64), (1, 1, 32, 64, 128, 256), (130, 1, 16, 128, 512, 64)] if HAS_GPU else []


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("absorbed_queries", "per_head_linear")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
@pytest.mark.parametrize("shape", [*CASES, *LARGE])
def test_kernels_against_float64(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> None:
    batch, n_tokens, heads, width, latent, geo = shape
    # As a part of one product, between other features.
    together = drawn(batch, n_tokens, 5 + heads * width + 3, dtype=dtype)
    q = together[..., 5 : 5 + heads * width].unflatten(-1, (heads, width))
    sem_map = drawn(heads, width, latent, seed=1, dtype=dtype) * width**-0.5
    geo_map = drawn(heads, width, geo, seed=2, dtype=dtype) * width**-0.5
    up = drawn(heads, latent, width, seed=3, dtype=dtype) * latent**-0.5
    read = drawn(batch, heads, n_tokens, latent, seed=5, dtype=dtype).transpose(1, 2)
    wide_values = reference_per_head_linear(read.double(), up.double())
    # Kernels of 16 bits have the reference's rounding of scaled queries, before the product.
    scaled = (q.float() * 0.3).to(dtype).double()
    for rows in {1, batch}:
        angles = drawn(*((rows, 1) if rows > 1 else (1,)), n_tokens, geo // 2, seed=4) * 3
        cos, sin = angles.cos(), angles.sin()
        found = absorbed_queries(q, sem_map, geo_map, cos, sin, 0.3)
        wanted = reference_absorbed_queries(*(one.double() for one in (q, sem_map, geo_map, cos, sin)), scale=0.3)
        wanted[..., :latent] = reference_per_head_linear(scaled, sem_map.double())
        _check(found, wanted, dtype)
    _check(per_head_linear(read, up), wide_values, dtype)


def _check(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    assert found.is_contiguous()
    bound = torch.finfo(dtype).eps * wanted.abs() + 2e-5 * wanted.abs().amax()
    worst = ((found.double() - wanted).abs() / bound).amax()
    assert worst <= 1, f"{tuple(found.shape)}: error is {float(worst):.2f} of the bound"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_dtypes_have_sums_as_wide(dtype: torch.dtype) -> None:
    """In the reference: the kernels' products would be tf32, or of no dtype that they compile."""
    q, up = drawn(1, 2, 2, 24, dtype=dtype), drawn(2, 24, 32, seed=1, dtype=dtype)
    geo_map, angles = drawn(2, 24, 16, seed=2, dtype=dtype), drawn(1, 2, 8, seed=3, dtype=dtype)
    cos, sin = angles.cos(), angles.sin()
    with pytest.MonkeyPatch.context() as patched:
        for op in ("absorbed_queries", "per_head_linear"):
            patched.setitem(backend.launchers, (op, DEVICE), _launched)
        found = absorbed_queries(q, up, geo_map, cos, sin, 0.3), per_head_linear(q, up)
    wide = q.double()
    wanted = (
        reference_absorbed_queries(wide, up.double(), geo_map.double(), cos.double(), sin.double(), 0.3),
        reference_per_head_linear(wide, up.double()),
    )
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)


def _launched(*_: object) -> Tensor:
    raise AssertionError("a kernel was launched")


def test_no_rows_launch_nothing() -> None:
    q, maps = drawn(0, 1, 2, 4, dtype=torch.float16), drawn(2, 4, 6, dtype=torch.float16)
    table = drawn(1, 1, 3)
    assert absorbed_queries(q, maps, maps, table, table, 1.0).shape == (0, 1, 2, 12)
    assert per_head_linear(q, maps).shape == (0, 1, 2, 6)
