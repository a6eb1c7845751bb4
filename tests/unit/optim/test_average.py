"""The running average of weights, and learning rates over a span that is not the phase."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from caramba.config.train import PhaseConfig
from caramba.optim import WeightAverage, learning_rate


def test_the_average_is_the_formula_and_resumes() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    average = WeightAverage([("w", weight)], decay=0.5)
    expected = 0.0
    for step in range(1, 21):
        with torch.no_grad():
            weight.fill_(step)
        average.update()
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        if step == 10:
            state = {
                "steps": average.state_dict()["steps"],
                "average": {"w": average.state_dict()["average"]["w"].clone()},
            }
            resumed = WeightAverage([("w", nn.Parameter(torch.zeros(2, dtype=torch.float64)))], decay=0.5)
            resumed.load_state_dict(state)
            average = resumed
            average._parameters["w"] = weight
    average.copy_to_weights()
    torch.testing.assert_close(weight.detach(), torch.full((2,), expected, dtype=torch.float64))
    assert expected < 19.5, "behind the last weight"


def test_a_span_has_a_schedule_of_its_own() -> None:
    phase = PhaseConfig(phase="blockwise", steps=100, lr=1.0, warmup_steps=10, min_lr_ratio=0.1)
    whole = [learning_rate(phase, step) for step in range(100)]
    assert whole[9] == 1.0
    assert whole[-1] == pytest.approx(0.1)
    part = [learning_rate(phase, step, 20) for step in range(20)]
    assert part[1] == 1.0, "the warm-up is a tenth of the span too"
    assert part[0] == 0.5
    assert part[-1] == pytest.approx(0.1)
