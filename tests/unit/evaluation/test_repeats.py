"""What repeats of a benchmark come to: one mean, and a deviation that does not shrink by repeating what is fixed."""

from __future__ import annotations

import math
import statistics

import pytest

from caramba.evaluation.suite import pool_metrics
from caramba.result import Metric


def repeats(values: list[float], std: float | None, n: int | None = 5) -> list[Metric]:
    return [Metric("a.teacher.x", value, "u", n, std, "a") for value in values]


def test_the_same_loss_on_the_same_windows_keeps_its_standard_error() -> None:
    """The interval of a perplexity that was measured three times was zero: it says how windows differ, not repeats."""
    same = repeats([36.4, 36.4, 36.4], 1.5, 73)
    assert pool_metrics(same) == same[0]


def test_times_vary_within_and_between_repeats() -> None:
    found = pool_metrics(repeats([1.0, 2.0, 3.0], 0.5))
    assert (found.value, found.n) == (2.0, 15)
    assert found.std == pytest.approx(math.hypot(0.5, 1.0))


def test_single_samples_are_the_samples_of_their_repeats() -> None:
    found = pool_metrics(repeats([1.0, 2.0, 4.0], None, 1))
    assert (found.n, found.std) == (3, pytest.approx(statistics.stdev([1.0, 2.0, 4.0])))


def test_repeats_of_a_standard_error_have_one() -> None:
    same = [Metric("a.teacher.nll", value, "u", 5, None, "a", 0.5) for value in (1.0, 2.0, 3.0)]
    found = pool_metrics(same)
    assert (found.std, found.standard_error) == (None, pytest.approx(math.hypot(0.5, 1.0)))
    assert found.spread == found.standard_error
