"""Every schedule against its closed form, warm-up and end included."""

from __future__ import annotations

import math

import pytest

from caramba.config.train import PhaseConfig
from caramba.optim import learning_rate

STEPS, WARMUP, LEAST = 50, 10, 0.1
CLOSED = {
    "none": lambda step: 1.0,
    "constant": lambda step: 1.0,
    "linear": lambda step: 1 - (step - WARMUP) / 39,
    "cosine": lambda step: math.cos(math.pi * (step - WARMUP) / 39 / 2) ** 2,
    "wsd": lambda step: 1.0 if step < 39 else 1 - math.sqrt((step - 39) / 10),
}


@pytest.mark.parametrize("scheduler", CLOSED)
def test_schedules_are_their_closed_forms(scheduler: str) -> None:
    values = {"phase": "pretrain", "steps": STEPS, "warmup_steps": WARMUP, "min_lr_ratio": LEAST, "lr": 2.0}
    phase = PhaseConfig.model_validate(values | {"scheduler": scheduler})
    for step in range(STEPS):
        factor = (step + 1) / WARMUP if step < WARMUP else LEAST + (1 - LEAST) * CLOSED[scheduler](step)
        assert learning_rate(phase, step) == pytest.approx(2.0 * factor, abs=1e-12), step
    end = {"none": 2.0, "constant": 2.0}.get(scheduler, 2.0 * LEAST)
    assert learning_rate(phase, STEPS - 1) == pytest.approx(end)


def test_a_decay_longer_than_what_the_warm_up_leaves_begins_after_it() -> None:
    phase = PhaseConfig(
        phase="pretrain", steps=10, warmup_steps=6, scheduler="wsd", decay_ratio=1.0, lr=1.0, min_lr_ratio=0.0
    )
    rates = [learning_rate(phase, step) for step in range(10)]
    assert rates[5] == rates[6] == 1.0
    assert rates[7] == pytest.approx(1 - math.sqrt(1 / 3))
    assert rates[9] == 0.0
