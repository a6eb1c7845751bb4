"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from caramba.config.train import PhaseConfig


def learning_rate(phase: PhaseConfig, step: int) -> float:
    """Return the learning rate of optimiser step `step` (0-based): linear warm-up, then constant, linear or cosine.

    Decaying schedules end at `lr * min_lr_ratio` on the last step. `none` and `constant` do not decay.
    """
    if step < phase.warmup_steps:
        return phase.lr * (step + 1) / phase.warmup_steps
    if phase.scheduler in ("none", "constant"):
        return phase.lr
    span = max(1, phase.steps - 1 - phase.warmup_steps)
    progress = min(1.0, (step - phase.warmup_steps) / span)
    remaining = 1.0 - progress if phase.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return phase.lr * (phase.min_lr_ratio + (1.0 - phase.min_lr_ratio) * remaining)
