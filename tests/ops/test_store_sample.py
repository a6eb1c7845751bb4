"""`store_sample`: its contract and its reference."""

from __future__ import annotations

import pytest
import torch

from caramba.errors import ConfigError
from caramba.ops.sample import store_sample


def made(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    """Return token, log-probability, count, what is kept of both, and what is fed next."""
    token, step = torch.arange(7, 7 + rows), torch.zeros((), dtype=torch.int64)
    kept = torch.zeros(rows, columns, dtype=torch.int64), torch.zeros(rows, columns)
    return token, -torch.arange(1.0, rows + 1), step, *kept, torch.zeros(rows, dtype=torch.int64)


def test_a_draw_goes_into_its_column_and_the_last_one_is_written_again() -> None:
    given = made(3, 2)
    token, logprob, step, tokens, logprobs, fed = given
    for drawn in range(3):
        token += 10
        store_sample(*given)
        assert step == drawn + 1
        assert torch.equal(fed, token)
    assert tokens.tolist() == [[17, 37], [18, 38], [19, 39]]
    assert torch.equal(logprobs, logprob[:, None].expand(3, 2))
    torch.library.opcheck(torch.ops.caramba.store_sample.default, made(2, 4))


def test_what_does_not_fit_is_refused() -> None:
    token, logprob, step, tokens, logprobs, fed = made(3, 2)
    with pytest.raises(ConfigError, match=r"logprob is torch.float64 \(3,\) on cpu, expected torch.float32 \(3,\)"):
        store_sample(token, logprob.double(), step, tokens, logprobs, fed)
    with pytest.raises(ConfigError, match=r"tokens is torch.int64 \(2, 2\) on cpu, expected torch.int64 \(3, 2\)"):
        store_sample(token, logprob, step, tokens[:2], logprobs[:2], fed)
    with pytest.raises(ConfigError, match=r"logprobs has shape \(3, 2\) and strides \(1, 3\), expected contiguous"):
        store_sample(token, logprob, step, tokens, logprobs.t().contiguous().t(), fed)
    with pytest.raises(ConfigError, match=r"fed is torch.int64 \(2,\) on cpu, expected torch.int64 \(3,\)"):
        store_sample(token, logprob, step, tokens, logprobs, fed[:2])
