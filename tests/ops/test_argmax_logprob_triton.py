"""The Triton kernels of `argmax_logprob` on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from torch import Tensor

from caramba.ops.sample import reference_argmax_logprob

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]
SHAPES = [(1, 5), (3, 2500), (2, 1024), *([(1, 128256), (8, 2_000_003)] if HAS_GPU else [])]


def launched(logits: Tensor) -> tuple[Tensor, Tensor]:
    return importlib.import_module("caramba.kernels.triton.argmax_logprob").argmax_logprob(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])])
@pytest.mark.parametrize("shape", SHAPES)
def test_of_equals_the_first_and_its_log_probability(shape: tuple[int, int], dtype: torch.dtype) -> None:
    # Twice as wide, so that rows do not lie one behind the other.
    given = torch.randn(shape[0], 2 * shape[1], generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
    logits = given[:, : shape[1]]
    logits[:, shape[1] // 2 :: max(1, shape[1] // 5)] = logits.amax()
    logits[0, 0] = float("-inf")
    index, logprob = launched(logits)
    want = reference_argmax_logprob(logits.cpu().double())
    assert torch.equal(index.cpu(), want[0])
    torch.testing.assert_close(logprob.cpu().double(), want[1], rtol=1e-5, atol=1e-5)


def test_rows_with_nan_and_parts_of_nothing() -> None:
    logits = torch.full((3, 2500), float("-inf"), device=DEVICE)
    logits[0, 2000], logits[1], logits[2] = 0.0, 1.0, 1.0
    logits[1, 7], logits[2, :] = float("nan"), float("nan")
    index, logprob = launched(logits)
    assert (int(index[0]), float(logprob[0])) == (2000, 0.0)
    assert logprob[1:].isnan().all()
    assert ((index >= 0) & (index < 2500)).all()
