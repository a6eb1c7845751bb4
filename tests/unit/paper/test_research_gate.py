"""The registered test: false wins, power, ties, failures, and registrations that cannot decide."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from caramba.config.paper import GateConfig
from caramba.paper.research.gate import Pair, best_trial, budget_difference, e_values, gains, look

GATE = GateConfig(metric="loss", direction="less")


def pairs(*differences: float) -> list[Pair]:
    return [Pair(seed, 1.0, 1.0 - gain) for seed, gain in zip(GATE.seeds, differences, strict=False)]


@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0, 1.0), (0.1, 5.0, 0.0, 2.0), (1e-9, 1e9, 3.0, 3.0)])
def test_e_values_over_all_signs_have_mean_one(sizes: tuple[float, ...]) -> None:
    ends = [
        e_values([sign * size for sign, size in zip(signs, sizes, strict=True)])[-1]
        for signs in itertools.product((-1, 1), repeat=len(sizes))
    ]
    assert math.fsum(ends) / len(ends) == pytest.approx(1.0)


def test_differences_of_zero_accept_nothing() -> None:
    seen = look(pairs(*[0.0] * 10), GATE)
    assert (seen.e_value, seen.state) == (1.0, "rejected")


def test_a_clear_improvement_is_accepted_at_the_first_look_that_reaches_the_threshold() -> None:
    seen = look(pairs(*[1.0] * 10), GATE)
    assert (seen.state, seen.n_seeds) == ("accepted", GATE.fewest_seeds)
    assert look(pairs(*[1.0] * 6), GATE).state == "continue"
    assert look(pairs(*[-1.0] * 5), GATE).state == "rejected"


def test_a_failed_candidate_loses_and_a_failed_baseline_gains_nothing() -> None:
    found = [Pair(1, 1.0, 0.5), Pair(2, 1.0, None), Pair(3, None, 0.5), Pair(4, 1.0, math.nan)]
    assert gains(found, GATE) == [0.5, -0.5, 0.0, -0.5]
    assert look([Pair(seed, 1.0, None) for seed in GATE.seeds], GATE).state == "rejected"


def test_direction_more_counts_higher_values_as_gains() -> None:
    gate = GateConfig(metric="accuracy", direction="more")
    assert gains([Pair(1, 0.5, 0.75)], gate) == [0.25]


def test_pairs_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="registered order"):
        look([Pair(2, 1.0, 0.5)], GATE)


def test_too_few_seeds_are_refused_with_the_number_needed() -> None:
    with pytest.raises(ValidationError, match="need at least 7"):
        GateConfig(metric="loss", direction="less", seeds=(1, 2, 3, 4, 5, 6))
    assert GateConfig(metric="loss", direction="less", candidates=1, seeds=(1, 2, 3, 4, 5)).fewest_seeds == 5


def test_budgets_are_compared_as_shares() -> None:
    assert budget_difference(100, 98) == pytest.approx(0.02)
    assert budget_difference(0, 0) == 0.0


def is_accepted(draw: Callable[[], float], effect: float = 0.0) -> bool:
    """Return whether a candidate of this effect is accepted at one of the looks."""
    tested: list[Pair] = []
    for seed in GATE.seeds:
        tested.append(Pair(seed, 0.0, -(effect + draw())))
        if (state := look(tested, GATE).state) != "continue":
            return state == "accepted"
    return False


def test_simulated_loops_keep_the_level_and_find_a_true_improvement() -> None:
    chance, loops = random.Random(20261126), 300
    draws: dict[str, Callable[[], float]] = {
        "normal": lambda: chance.gauss(0.0, 1.0),
        "heavy-tailed": lambda: chance.gauss(0.0, 1.0) / (abs(chance.gauss(0.0, 1.0)) or 1.0),
        "tied": lambda: chance.choice((0.0, 0.0, -1.0, 1.0)),
        "two sizes": lambda: chance.gauss(0.0, chance.choice((1.0, 100.0))),
    }
    for name, draw in draws.items():
        wins = sum(any(is_accepted(draw) for _ in range(GATE.candidates)) for _ in range(loops))
        assert wins / loops <= 0.055, name
    assert sum(is_accepted(draws["normal"], 2.0) for _ in range(loops)) / loops >= 0.9


def test_the_first_of_the_best_trials_is_taken_and_none_that_failed() -> None:
    assert best_trial([2.0, None, 1.0, math.nan, 1.0], GATE) == 2
    assert best_trial([None, -math.inf, None], GATE) == 0
    assert best_trial([2.0, 3.0], GATE.model_copy(update={"direction": "more"})) == 1
