"""What lookup drafts, and how many tokens are drafted as drafts are accepted or not."""

from __future__ import annotations

from caramba.config.generate import SpeculativeConfig
from caramba.infer.drafting import DraftLength, LookupDrafter


def test_lookup_takes_the_longest_and_latest_run_and_repeats_itself() -> None:
    drafter = LookupDrafter(3)
    assert drafter.propose([[5]], [3]) == ([[]], None)
    assert drafter.propose([[5, 6, 7, 9, 6, 7, 8, 5, 6, 7]], [2])[0] == [[9, 6]]  # 5 6 7, before 6 7
    assert drafter.propose([[5, 6, 7, 9, 6, 7, 8, 5, 6, 7, 2, 2, 2]], [4])[0] == [[2, 2, 2, 2]]


def test_length_adapts_falls_back_and_comes_back_with_hysteresis() -> None:
    config = SpeculativeConfig(spec_k=8, window=10, retry_after=6, spec_disable_below_accept=0.5, hysteresis=0.2)
    length = DraftLength(config)
    assert (length.next(20), length.next(3)) == (8, 3)
    length.update(8, 1, 2)
    assert length.next(20) == 7
    length.update(7, 7, 8)
    assert length.next(20) == 8
    for _ in range(6):
        length.update(8, 0, 1)
        if length.fallbacks:
            break
    assert (length.next(20), length.fallbacks) == (0, 1)
    length.update(0, 0, 6)
    assert length.next(20) == 8
    for _ in range(4):  # 2 of 3 judged: above the floor, below floor and hysteresis
        length.update(4, 2, 3)
    assert length.fallbacks == 2


def test_what_a_fallback_costs_is_forgotten_once_drafting_pays_again() -> None:
    config = SpeculativeConfig(
        spec_k=4,
        window=4,
        retry_after=2,
        spec_disable_below_accept=0.5,
        hysteresis=0.2,
        spec_k_adaptive=False,
    )
    length = DraftLength(config)
    for _ in range(4):
        length.update(4, 0, 1)
    assert (length.next(9), length.fallbacks) == (0, 1)
    length.update(0, 0, 2)
    length.update(4, 4, 5)  # on trial, all accepted: back for good
    for _ in range(2):  # at the floor, below floor and hysteresis
        length.update(4, 1, 2)
    assert (length.next(9), length.fallbacks) == (4, 1)
