"""What a row takes of the tokens it is given, many at once or one by one."""

from __future__ import annotations

import math

import pytest

from caramba.errors import CheckpointError
from caramba.infer.row import GenerationRow

TOKENS = [5, 6, 7, 8, 9]
LOGPROBS = [-0.5, -1.0, -1.5, -2.0, -2.5]


def row(max_new_tokens: int, *eos_ids: int) -> GenerationRow:
    return GenerationRow(0, [1, 2], 7, eos_ids, max_new_tokens, None)


@pytest.mark.parametrize(
    ("made", "n_kept", "finish"),
    [
        ((9,), 5, None),
        ((5,), 5, "length"),
        ((3,), 3, "length"),
        ((9, 4), 5, None),
        ((9, 4, 7), 2, "eos"),
        ((2, 7), 2, "length"),  # ended before its end mark
        ((3, 7), 2, "eos"),
        ((9, 5), 0, "eos"),
    ],
)
def test_a_row_ends_at_its_length_or_end_mark_in_any_portions(
    made: tuple[int, ...], n_kept: int, finish: str | None
) -> None:
    for portions in ([5], [2, 3], [1] * 5):
        one, at = row(*made), 0
        for n in portions:
            one.take(TOKENS[at : at + n], LOGPROBS[at : at + n], None)
            at += n
        assert (one.tokens, one.logprobs) == (TOKENS[:n_kept], LOGPROBS[:n_kept])
        assert one.finish == finish


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_no_numbers_are_refused_where_they_count(bad: float) -> None:
    given = [*LOGPROBS[:3], bad, LOGPROBS[4]]
    one = row(9)
    with pytest.raises(CheckpointError, match=r"new token 3 of row 0 are not numbers"):
        one.take(TOKENS, given, None)
    assert one.tokens == TOKENS[:3]
    ended = row(3)
    ended.take(TOKENS, given, None)
    assert (ended.tokens, ended.finish) == (TOKENS[:3], "length")
