"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from caramba.config.train import PhaseConfig


def learning_rate(phase: PhaseConfig, step: int, steps: int | None = None) -> float:
    """Return the learning rate of optimiser step `step` (0-based): linear warm-up, then constant, linear or cosine.

    Decaying schedules end at `lr * min_lr_ratio` on the last step. `none` and `constant` do not decay. With `steps`
    the schedule spans that many steps in place of the phase's, and its warm-up is shortened as much.
    """
    assert phase.lr != "auto", "lr is settled for the model's width before a phase starts"
    steps = phase.steps if steps is None else steps
    warmup = phase.warmup_steps * steps // phase.steps
    if step < warmup:
        return phase.lr * (step + 1) / warmup
    if phase.scheduler in ("none", "constant"):
        return phase.lr
    span = max(1, steps - 1 - warmup)
    progress = min(1.0, (step - warmup) / span)
    remaining = 1.0 - progress if phase.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return phase.lr * (phase.min_lr_ratio + (1.0 - phase.min_lr_ratio) * remaining)
