"""The Triton kernel of `store_sample` on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from caramba.ops.sample import reference_store_sample

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_it_keeps_what_the_reference_keeps(rows: int) -> None:
    kernel = importlib.import_module("caramba.kernels.triton.store_sample").store_sample
    source = torch.Generator().manual_seed(rows)
    drawn = torch.randint(128256, (3, rows), generator=source), torch.randn(3, rows, generator=source)
    sides = []
    for device, run in (("cpu", reference_store_sample), (DEVICE, kernel)):
        kept = [torch.full((rows, 2), -1), torch.full((rows, 2), -1.0), torch.full((rows,), -1)]
        step, *kept = (x.to(device) for x in (torch.zeros((), dtype=torch.int64), *kept))
        for token, logprob in zip(*drawn, strict=True):
            run(token.to(device), logprob.to(device), step, *kept)
        assert step == 3
        sides.append([x.cpu() for x in kept])
    for one, other in zip(*sides, strict=True):
        assert torch.equal(one, other)
