"""The Triton kernel of `prompt_lookup_step` on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import os

import pytest
import torch

from caramba.ops.prompt_lookup_step import reference_prompt_lookup_step
from tests.ops.prompt_lookup_cases import lookup_case

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]


@pytest.mark.parametrize(
    ("seed", "width"),
    # Seeds choose texts and what is looked for in them.
    [(seed, width) for seed in range(6) for width in ((1, 2, 4, 8) if HAS_GPU else (1 << seed % 4,))],
)
def test_a_round_is_that_of_the_reference(seed: int, width: int) -> None:
    kernel = importlib.import_module("caramba.kernels.triton.prompt_lookup_step").prompt_lookup_step
    case = lookup_case(seed, [1, 9, 2049, 4100, 5], 4200, width)
    there = case.on(DEVICE)
    for _ in range(3):  # on what the one before left, as rounds come
        wanted = reference_prompt_lookup_step(*case.arguments)
        assert torch.equal(kernel(*there.arguments).cpu(), wanted)
        for mine, theirs in zip(there.arguments[:3], case.arguments[:3], strict=True):
            assert torch.equal(mine.cpu(), theirs)
        drawn = torch.cat((case.state[:, 2 : 1 + width], torch.ones_like(case.state[:, :1])), dim=1)
        drawn[2, width // 2 :] = 1
        for one in (case, there):
            one.held += width
            one.drawn.copy_(drawn)
