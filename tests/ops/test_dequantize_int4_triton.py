"""The Triton kernel of `dequantize_int4` against its reference, on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from caramba.errors import ConfigError
from caramba.ops.small_batch_linear import dequantize_int4, reference_dequantize_int4

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
@pytest.mark.parametrize(("n_rows", "n_groups", "group"), [(3, 5, 32), (1, 3, 64), (7, 35, 128)])
def test_every_number(n_rows: int, n_groups: int, group: int, dtype: torch.dtype) -> None:
    launched = importlib.import_module("caramba.kernels.triton.dequantize_int4").dequantize_int4
    device, source = "cuda" if HAS_GPU else "cpu", torch.Generator().manual_seed(0)
    size = (n_rows, n_groups * group // 4)
    words = torch.randint(-(2**15), 2**15, size, dtype=torch.int16, generator=source).to(device)
    scale = torch.randn(n_rows, n_groups, 2, generator=source).bfloat16().to(device)
    found = launched(words, scale, dtype)
    exact = reference_dequantize_int4(words, scale, torch.float64)
    assert (found.dtype, found.shape) == (dtype, exact.shape)
    # One rounding of a sum that cancels is one of its larger part.
    slack = torch.finfo(dtype).eps * (exact.abs() + 2**-20)
    assert ((found.double() - exact).abs() <= slack).all()


def test_what_does_not_fit_is_refused() -> None:
    words, scale = torch.zeros(3, 8, dtype=torch.int16), torch.zeros(3, 1, 2, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.caramba.dequantize_int4.default, (words, scale, torch.float32))
    for wrong in (
        (words.int(), scale),
        (words, scale.float()),
        (words, scale[:2]),
        (words[:, :7], scale.expand(3, 2, 2)),
    ):
        with pytest.raises(ConfigError, match=r"dequantize_int4: got .* expected torch.int16 \[N, K / 4\]"):
            dequantize_int4(*wrong, torch.float32)
