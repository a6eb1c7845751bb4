"""The Triton kernels of `sample` on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import os

import pytest
import torch
from torch import Tensor

from caramba.ops.sample import reference_sample

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
WIDE = torch.float64
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]
WIDEST = 1_000_000
"""Numbers of a row up to which the order of a sum leaves the draws of this file as they are."""
SHAPES = [(4, 5), (9, 2500), (4, 1024), *([(64, 128256), (8, 2_000_003)] if HAS_GPU else [])]


def launched(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    sample = importlib.import_module("caramba.kernels.triton.sample").sample
    return sample(logits, temperature.to(DEVICE), uniform.to(DEVICE))


def holds(logits: Tensor, temperature: Tensor, uniform: Tensor, token: Tensor) -> Tensor:
    """Whether the share of each row's token, which is none of a token at -inf, holds the number within 1e-12."""
    shares = (logits.to(WIDE) / temperature[:, None]).softmax(-1)
    share = shares.gather(-1, token[:, None])[:, 0]
    end = shares.cumsum(-1).gather(-1, token[:, None])[:, 0]
    return (share > 0) & (end - share <= uniform + 1e-12) & (uniform <= end + 1e-12)


def test_a_share_holds_its_numbers_and_no_others() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0, 0.0]]).expand(5, 4)
    token, uniform = torch.tensor([2, 2, 2, 0, 1]), torch.tensor([0.4, 0.3, 0.7, 0.4, 1 / 3], dtype=WIDE)
    assert holds(logits, torch.ones(5, dtype=WIDE), uniform, token).tolist() == [True, *[False] * 4]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for i, shape in enumerate(SHAPES)
        for at, dtype in enumerate((torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])))
        if HAS_GPU or at == i % 2
    ],
)
def test_the_token_whose_share_holds_the_number(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    # Twice as wide, so that rows do not lie one behind the other.
    given = (4 * torch.randn(shape[0], 2 * shape[1], generator=generator)).to(DEVICE, dtype)
    logits = given[:, : shape[1]]
    logits[:, shape[1] // 2 :: max(1, shape[1] // 5)] = logits.amax()
    logits[0, 0] = logits[:, -1] = float("-inf")
    temperature = torch.tensor([0.7, 0.0, 1.0, 40.0], dtype=WIDE).repeat(shape[0])[: shape[0]]
    # A column of a table, as the engine has it, and then numbers one behind the other.
    column = torch.stack((temperature, temperature + 3, temperature - 1), dim=1).to(DEVICE)[:, 0]
    for first in (0.0, 1 - 2**-53, None):
        uniform = torch.rand(shape[0], generator=generator, dtype=WIDE)
        if first is not None:
            uniform[:3] = first
        token, logprob = launched(logits, column if first is None else temperature, uniform)
        want, found = reference_sample(logits.cpu(), temperature, uniform)[0], token.cpu()
        if shape[1] <= WIDEST:
            assert torch.equal(found, want)
        else:
            # Sums of so many numbers end some 1e-13 apart, and next to 1 whole tokens are less than that.
            assert torch.equal(found[temperature == 0], want[temperature == 0])
            drawn = temperature > 0
            assert holds(logits.cpu()[drawn], temperature[drawn], uniform[drawn], found[drawn]).all()
        # The reference adds in float32 on a CPU, one number after the other: too coarse for two million.
        exact = logits.cpu().to(WIDE).log_softmax(-1).gather(-1, found.unsqueeze(-1)).squeeze(-1).float()
        torch.testing.assert_close(logprob.cpu(), exact, rtol=1e-5, atol=1e-5)


def test_rows_with_nan_and_parts_of_nothing() -> None:
    logits = torch.full((4, 2500), float("-inf"), device=DEVICE)
    logits[0, 2000], logits[1], logits[2], logits[3, 1024:1030] = 0.0, 1.0, 1.0, 2.0
    logits[1, 7], logits[2, :] = float("nan"), float("nan")
    temperature = torch.tensor([1.0, 1.0, 0.0, 0.5], dtype=WIDE)
    token, logprob = launched(logits, temperature, torch.full((4,), 0.5, dtype=WIDE))
    assert (int(token[0]), float(logprob[0]), int(token[3])) == (2000, 0.0, 1027)
    assert logprob[1:3].isnan().all()
    assert ((token >= 0) & (token < 2500)).all()
