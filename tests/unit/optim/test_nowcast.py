"""Forecasts of weights are exact where their form is, and snapshots are few and equally spaced."""

from __future__ import annotations

import pytest
import torch

from caramba.optim.nowcast import (
    FORECASTS,
    Snapshots,
    forecast_anderson,
    forecast_exponential,
    forecast_line,
)

GENERATOR = torch.Generator().manual_seed(0)
START, SLOPE = (torch.randn(3, 4, generator=GENERATOR, dtype=torch.float64) for _ in range(2))


def test_a_line_is_continued() -> None:
    snapshots = [START + SLOPE * t for t in range(5)]
    torch.testing.assert_close(forecast_line(snapshots, 3.0), START + SLOPE * 7)
    noisy = [one + 1e-3 * (-1) ** at for at, one in enumerate(snapshots)]
    torch.testing.assert_close(forecast_line(noisy, 1.0), START + SLOPE * 5, atol=2e-3, rtol=0)


def test_a_damped_exponential_is_continued_and_a_growing_one_is_damped() -> None:
    snapshots = [START + SLOPE * 0.7**t for t in range(4)]
    torch.testing.assert_close(forecast_exponential(snapshots, 2.0), START + SLOPE * 0.7**5)
    growing = [START + SLOPE * 1.5**t for t in range(3)]
    moved = (forecast_exponential(growing, 1.0) - growing[-1]).norm()
    assert moved < (growing[-1] - growing[-2]).norm()
    turning = [START, START + SLOPE, START]
    torch.testing.assert_close(forecast_exponential(turning, 5.0), START)


def test_anderson_finds_the_fixed_point_of_a_linear_map() -> None:
    """Of rank two: three differences span it."""
    matrix = torch.diag(torch.tensor([0.9, 0.5], dtype=torch.float64))
    fixed = torch.tensor([1.0, -2.0], dtype=torch.float64)
    w, snapshots = torch.zeros(2, dtype=torch.float64), []
    for _ in range(4):
        snapshots.append(w)
        w = fixed + matrix @ (w - fixed)
    found = forecast_anderson(snapshots, 1.0)
    assert (found - fixed).norm() < 0.1 * (snapshots[-1] - fixed).norm()


@pytest.mark.parametrize("name", list(FORECASTS))
def test_weights_that_stand_still_stay(name: str) -> None:
    snapshots = [START.clone() for _ in range(4)]
    torch.testing.assert_close(FORECASTS[name](snapshots, 2.0), START)


def test_two_snapshots_before_a_decision_are_kept_and_saved() -> None:
    kept = Snapshots(50)
    assert [step for step in range(1, 101) if kept.is_due(step)] == [30, 40, 80, 90]
    for step in range(10, 50, 10):
        kept.take(step, [START.float() + step * SLOPE.float()])
    assert kept.steps == [30, 40]
    assert kept.is_enough(50)
    assert not kept.is_enough(60)
    held = sum(w.numel() * w.element_size() for weights in kept.weights for w in weights)
    assert held == 2 * 4 * START.numel(), "the host has two copies in float32"
    now = [START.float() + 50 * SLOPE.float()]
    torch.testing.assert_close(kept.forecast("line", 1.0, now)[0], START.float() + 60 * SLOPE.float())
    again = Snapshots(50)
    again.load_state_dict(kept.state_dict())  # type: ignore[arg-type]
    assert torch.equal(again.forecast("line", 1.0, now)[0], kept.forecast("line", 1.0, now)[0])
    kept.take(80, [START])
    assert kept.steps == [80], "a step is missing: what was before is no series"
    every = Snapshots(1)
    assert all(every.is_due(step) for step in range(4))
