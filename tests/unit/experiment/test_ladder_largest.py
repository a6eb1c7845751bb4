"""Why the search of a row's largest batch ended; and weights that are moved by one unit in the last place."""

from __future__ import annotations

import pytest
import torch
from tests.unit.model.model_specs import MLP, NORM, spec

from caramba.experiment.ladder import Largest, largest_row, move_by_one_ulp, name_limit
from caramba.experiment.planning import Budget, StepCandidate, Trial, largest_batch
from caramba.model import build_model


@pytest.mark.parametrize(
    ("reason", "target", "most", "windows", "seconds", "slow_from"),
    [
        ("memory", 40, 512, 1000, 1e9, 1000),
        ("most_batch", 10_000, 64, 1000, 1e9, 1000),
        ("data", 10_000, 64, 30, 1e9, 1000),
        ("time", 40, 512, 1000, 20.0, 1000),
        ("speed", 10_000, 512, 1000, 1e9, 9),
    ],
)
def test_a_search_says_what_kept_it_from_a_larger_batch(
    reason: str, target: int, most: int, windows: int, seconds: float, slow_from: int
) -> None:
    def measure(candidate: StepCandidate) -> Trial:
        size = candidate.batch_size
        step = size * (2.0 if size >= slow_from else 1.0)
        return Trial(candidate, (step,) * (candidate.warm_up + candidate.timed), size)

    budget = Budget(seconds, clock=lambda: 0.0)
    *_, ended = largest_batch(measure, StepCandidate(1), target_bytes=target, most=min(most, windows), budget=budget)
    assert name_limit(ended, most, windows) == reason


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        (1e9, "not even one sequence fits"),
        (20.0, "batch 16, float32: 30 s of 20 s went into batches that do not fit"),
    ],
)
def test_a_row_without_a_batch_says_whether_memory_or_time_was_short(seconds: float, reason: str) -> None:
    now = 0.0

    def measure(candidate: StepCandidate) -> Trial:
        nonlocal now
        now += 15.0
        return Trial(candidate, refusal="out of memory", is_out_of_memory=True)

    budget = Budget(seconds, clock=lambda: now)
    best, trials, ended = largest_batch(measure, StepCandidate(1), target_bytes=1.0, most=512, budget=budget, first=64)
    row = largest_row(Largest(best, trials, name_limit(ended, 512, 1000), budget), 128, None)
    assert row == {"largest_skipped": reason, "largest_s": now}


def test_a_twin_s_weights_are_one_unit_in_the_last_place_away_by_draws_of_its_own() -> None:
    model, first, second = (build_model(spec(NORM, MLP), seed=0) for _ in range(3))
    move_by_one_ulp(first, 1)
    move_by_one_ulp(second, 2)
    moved = dict(first.named_parameters())
    others = dict(second.named_parameters())
    ups: list[torch.Tensor] = []
    for name, weight in model.named_parameters():
        up, down = (torch.nextafter(weight, torch.full_like(weight, to)) for to in (torch.inf, -torch.inf))
        is_up = moved[name] == up
        assert torch.all(is_up | (moved[name] == down))
        assert not torch.equal(moved[name], others[name])
        ups.append(is_up.flatten())
    assert torch.cat(ups).double().mean().item() == pytest.approx(0.5, abs=0.05)
