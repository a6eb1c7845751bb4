"""The Triton kernels of float8 casts against the reference: on a GPU in bfloat16 and at the sizes of a 1B model,
without one in Triton's interpreter, by `tests/ops/test_in_the_interpreter.py`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from caramba import kernels
from caramba.ops import backend, float8_cast
from caramba.ops.float8_cast import reference_float8_cast

HAS_GPU = torch.cuda.is_available()
INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    *([] if INTERPRETS else [pytest.mark.gpu]),
    pytest.mark.skipif(
        HAS_GPU == INTERPRETS, reason="needs a CUDA device, or TRITON_INTERPRET=1 without one"
    ),
    pytest.mark.skipif(
        HAS_GPU and torch.cuda.get_device_capability() < (8, 9), reason="no float8 on this device"
    ),
]
SHAPES = [(256, 128), (48, 304)]
LARGE = [(16384, 2048), (2048, 16384), (4096, 3072), (2064, 8192)] if HAS_GPU else []


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    if HAS_GPU:
        kernels.load("cuda")
    else:
        module = importlib.import_module("caramba.kernels.triton.float8_cast")
        backend.attach("float8_cast", "cpu", "triton", module.float8_cast)
    assert backend.implementation("float8_cast", DEVICE) == "triton"
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


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


@pytest.mark.parametrize("per_tensor", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
def test_kernels_give_the_bits_of_the_reference(shape: tuple[int, int], per_tensor: bool) -> None:
    x = drawn(shape)
    x[:, 5], x[3] = 0.0, 0.0
    for dtype in (torch.float32, torch.bfloat16) if HAS_GPU else (torch.float32,):
        for e5m2 in (False, True):
            got = float8_cast(x.to(dtype), per_tensor=per_tensor, e5m2=e5m2)
            wants = reference_float8_cast(x.to(dtype), per_tensor, e5m2)
            for ours, want in zip(got, wants, strict=True):
                assert (ours.dtype, ours.shape, ours.is_contiguous()) == (want.dtype, want.shape, True)
                torch.testing.assert_close(ours.float(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(not HAS_GPU, reason="the interpreter's casts keep no NaN")
def test_what_is_infinite_does_not_stay_unseen() -> None:
    x = torch.ones(32, 48, device=DEVICE)
    x[2, 3] = torch.inf
    for per_tensor in (False, True):
        rows, row_scale, columns, column_scale = float8_cast(x, per_tensor=per_tensor)
        assert not torch.isfinite(rows.float() * row_scale)[2].all()
        assert not torch.isfinite(columns.float() * column_scale)[3].all()
