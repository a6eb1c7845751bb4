"""The Triton kernels of float8 casts against the reference: on a GPU in bfloat16 and at the sizes of a 1B model,
without one in Triton's interpreter, by `tests/ops/test_units_in_the_interpreter.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caramba.ops.float8_cast import (
    float8_cast,
    float8_swiglu,
    float8_swiglu_backward,
    reference_float8_cast,
    reference_float8_swiglu,
    reference_float8_swiglu_backward,
)
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = [
    *RUNS_KERNELS,
    pytest.mark.skipif(HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="no float8 on this device"),
]
NAMES = ("rows", "scales of rows", "columns", "scales of columns")
SHAPES = [(256, 128), (48, 304)]
LARGE = [(16384, 2048), (2048, 16384), (4096, 3072), (2064, 8192)] if HAS_GPU else []


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("float8_cast", "float8_swiglu")


def drawn(shape: tuple[int, int]) -> Tensor:
    """Numbers of many magnitudes. The interpreter does not round to the nearest: it gets what float8 holds."""
    generator = torch.Generator().manual_seed(0)
    if not HAS_GPU:
        mantissa, exponent = (torch.randint(0, 4, shape, generator=generator) for _ in range(2))
        x = (4.0 + mantissa) * 0.5**exponent * (1 - 2.0 * (mantissa + exponent).remainder(2))
        x[0, 0] = 448.0  # the largest of both formats, but for a power of two
        x[0, 1:] *= 8.0
        x[1:, 0] *= 8.0
        return x
    x = torch.randn(*shape, generator=generator).to(DEVICE) * torch.logspace(-6, 6, shape[1], device=DEVICE)
    x[7, 9] = torch.nan
    return x


def described(
    what: str, dtype: torch.dtype, got: tuple[Tensor, ...], wants: tuple[Tensor, ...], at: int, bad: Tensor
) -> str:
    """How many numbers differ, where the first and last do, what they are, and the scales by their bits."""
    places = bad.nonzero()
    few = torch.cat((places[:4], places[-4:]))
    pairs = [(float(got[at][i, j]), float(wants[at][i, j])) for i, j in few.tolist()]
    scales = [(float(got[i][0, 0]).hex(), float(wants[i][0, 0]).hex()) for i in (1, 3)]
    return (
        f"{what} of {dtype} {tuple(bad.shape)}: {len(places)} differ, in {len(places[:, 0].unique())} rows and "
        f"{len(places[:, 1].unique())} columns, such as {few.tolist()}: (ours, reference) {pairs}; scales {scales}"
    )


def are_each_others_transpose(rows: Tensor, columns: Tensor) -> bool:
    """By their bits, NaN's too."""
    return torch.equal(rows.view(torch.uint8).t(), columns.view(torch.uint8))


def test_the_references_scale_is_one_division_as_torchaos() -> None:
    x = torch.rand(64, 16, 16, device=DEVICE) * 4.0
    for one in x:
        for e5m2, most in ((False, 448.0), (True, 57344.0)):
            scale = (torch.tensor(most, dtype=torch.float64) / one.amax().double().cpu()).float()
            _, inverse, _, _ = reference_float8_cast(one, True, e5m2)
            assert inverse.item() == scale.reciprocal().item()


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
def test_kernels_give_the_bits_of_the_reference(shape: tuple[int, int], per_tensor: bool) -> None:
    x = drawn(shape)
    x[:, 5], x[3] = 0.0, 0.0
    for dtype in (torch.float32, torch.bfloat16) if HAS_GPU else (torch.float32,):
        for e5m2 in (False, True):
            got = float8_cast(x.to(dtype), per_tensor=per_tensor, e5m2=e5m2)
            wants = reference_float8_cast(x.to(dtype), per_tensor, e5m2)
            for at in (1, 3, 0, 2):  # scales first: where one differs, so do the numbers
                ours, want = got[at], wants[at]
                assert (ours.dtype, ours.shape, ours.is_contiguous()) == (want.dtype, want.shape, True)
                ours, want = ours.float(), want.float()
                differs = ~((ours == want) | (ours.isnan() & want.isnan()))
                assert not differs.any(), described(NAMES[at], dtype, got, wants, at, differs)
            assert not per_tensor or are_each_others_transpose(got[0], got[2])


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("shape", [(128, 64), (48, 80), *([(16384, 8192)] if HAS_GPU else [])])
def test_swiglu_and_its_gradient_are_those_of_the_reference(shape: tuple[int, int], per_tensor: bool) -> None:
    m, f = shape
    generator = torch.Generator(DEVICE).manual_seed(0)
    packed, grad = (
        torch.randn(m, n, generator=generator, device=DEVICE).to(torch.bfloat16 if HAS_GPU else torch.float32)
        for n in (2 * f, f)
    )
    scales = [2.0 ** torch.randint(-9, 9, (n, 1), generator=generator, device=DEVICE) for n in shape]
    pairs = (
        (float8_swiglu(packed, per_tensor=per_tensor), reference_float8_swiglu(packed, per_tensor)),
        (
            float8_swiglu_backward(grad, scales[0], scales[1], packed, per_tensor=per_tensor),
            reference_float8_swiglu_backward(grad, scales[0], scales[1], packed, per_tensor, per_tensor),
        ),
    )
    for got, wants in pairs:
        for ours, want in zip(got, wants, strict=True):
            assert (ours.dtype, ours.shape, ours.is_contiguous()) == (want.dtype, want.shape, True)
        for at in (0, 2):
            torch.testing.assert_close(got[at + 1], wants[at + 1], rtol=1e-5, atol=0.0)
            ours, want = got[at].float(), wants[at].float()
            step = 2.0**-2 if wants[at].dtype == torch.float8_e5m2 else 2.0**-3
            is_near = (ours - want).abs() <= step * want.abs() + 2.0**-9
            # exp rounds differently; the interpreter also loses an exponent where a mantissa is rounded up to 2.
            if HAS_GPU:
                assert is_near.all(), described(NAMES[at], packed.dtype, got, wants, at, ~is_near)
            else:
                assert is_near.float().mean() > 0.9
            assert (ours != want).float().mean() < (0.01 if HAS_GPU else 0.25)
        assert not per_tensor or are_each_others_transpose(got[0], got[2])


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter's casts keep no NaN")
def test_what_is_infinite_does_not_stay_unseen() -> None:
    x = torch.ones(32, 48, device=DEVICE)
    x[2, 3] = torch.inf
    for per_tensor in (False, True):
        rows, row_scale, columns, column_scale = float8_cast(x, per_tensor=per_tensor)
        assert not torch.isfinite(rows.float() * row_scale)[2].all()
        assert not torch.isfinite(columns.float() * column_scale)[3].all()
