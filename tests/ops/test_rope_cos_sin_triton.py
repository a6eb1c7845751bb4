"""The Triton kernel of `rope_cos_sin` on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 4), (3, 2, 5, 3, 8), (16, 1, 1, 1, 128)], ids=str)
def test_far_positions_are_turned_as_precisely_as_near_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    n, batch, groups, n_tokens, pairs = shape
    source = torch.Generator().manual_seed(0)
    offset = torch.randint(0, 131072, (batch, n_tokens), generator=source, dtype=dtype)
    frequencies = torch.rand(n, groups, pairs, generator=source)
    launched = importlib.import_module("caramba.kernels.triton.rope_cos_sin").rope_cos_sin
    # The positions of a step may be a view.
    given = offset.t().contiguous().t().to(DEVICE)
    cos, sin = launched(given, frequencies.to(DEVICE))
    assert cos.shape == sin.shape == shape
    # The angle in float32, as everywhere; its cosine and sine to a unit or two in the last place.
    angles = (offset.float()[None, :, None, :, None] * frequencies[:, None, :, None, :]).double()
    for found, wanted in ((cos, angles.cos()), (sin, angles.sin())):
        torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=2e-7)
