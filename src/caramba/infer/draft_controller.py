"""Whether the drafts of a prompt lookup are worth a forward over several tokens instead of one."""

from __future__ import annotations

from collections.abc import Sequence

from caramba.config.generate import SpeculativeConfig
from caramba.infer.drafting import DraftLength

PRICE_ALONE, PRICE_TOGETHER = 0.4, 0.2
"""What a forward over 2 to 8 tokens of a row takes longer than one over 1, in forwards over 1: of one row, whose
products then go to tensor cores, and of several, whose products are there already.

On an H200 a 1B model verifies 8 tokens in 1.18 ms where a step takes 0.87; how many they are counts for little. The
price is a constant, not timed: which forwards run must not depend on the clock, as their roundings differ.
"""
FIRST_WORTH = (0.4, 0.8, 1.4, 2.0)
"""Accepted drafts behind a run of 1, 2, 3, and more tokens, before a row has shown any."""
RATE = 1 / 12


class DraftController:
    """Learns how many drafts after a match of each length become text, and estimates the gain of drafting next.

    Drafts cost nothing to look up, so those that are not verified are judged as well, by the text that comes.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        # How many are verified together hardly changes what it takes, so their number does not adapt.
        self.length = DraftLength(config.model_copy(update={"spec_k_adaptive": False}))
        self.worth = {size: FIRST_WORTH[min(size, 4) - 1] for size in range(1, config.max_ngram + 1)}
        self._open: list[
            tuple[int, Sequence[int], int]
        ] = []  # run, drafts, and those that became text so far

    def expected_accepted(self, size: int, left: int) -> float:
        """Return the tokens that drafts behind a run of `size` tokens are expected to add, of at most `left`.

        It is 0 where there are none or drafting has stopped, and `left` where it does not adapt.
        """
        if size == 0 or left < 1 or self.length.next(left) == 0:
            return 0.0
        return min(self.worth[size], left) if self.config.spec_k_adaptive else float(left)

    def learn(self, size: int, drafts: Sequence[int], tokens: Sequence[int], drafted: int) -> int:
        """Update from the tokens after offered drafts, `drafted` of them verified; return the number accepted."""
        accepted = common_prefix_len(drafts[:drafted], tokens)
        self.length.update(drafted, accepted, len(tokens))
        offered = self._open if size == 0 else [*self._open, (size, drafts, 0)]
        self._open = []
        for run, own, n_before in offered:
            n = n_before + common_prefix_len(own[n_before:], tokens)
            if n == n_before + len(tokens) and n < len(own):
                self._open.append((run, own, n))
            else:
                self.worth[run] += RATE * (n - self.worth[run])
        return accepted


def common_prefix_len(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many tokens two texts begin with in common."""
    for at, (mine, theirs) in enumerate(zip(drafts, tokens, strict=False)):
        if mine != theirs:
            return at
    return min(len(drafts), len(tokens))
