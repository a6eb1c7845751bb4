"""The share of a run that planning takes: one budget for all phases, and a reason where it is over."""

from __future__ import annotations

import pytest

from caramba.experiment.planning import Budget, StepCandidate, Trial
from caramba.experiment.resolve_plans import explain_share


def test_phases_share_the_least_and_a_long_phase_has_its_share() -> None:
    assert [Budget.of_phases(n).seconds for n in (1, 2, 3, 9)] == [120.0, 60.0, 40.0, 30.0]
    budget = Budget.of_phases(3)
    budget.cover(4000.0)
    assert budget.seconds == pytest.approx(200.0)


def test_planning_over_its_share_names_what_it_went_into() -> None:
    trials = [
        Trial(StepCandidate(8), (21.0, 1.0, 1.0, 1.0, 1.0)),
        Trial(StepCandidate(64), refusal="out of memory", is_out_of_memory=True),
    ]
    assert explain_share(20.0, 400.0, trials) == ""
    text = explain_share(60.0, 400.0, trials)
    assert "60 s, 15% of the 400 s" in text
    assert "2 trials with 20 s of compilation and first steps, 5 s of steps and 35 s of starting" in text
