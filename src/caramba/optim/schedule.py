"""Learning-rate schedules as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from caramba.config.train import PhaseConfig


def learning_rate(phase: PhaseConfig, step: int, steps: int | None = None) -> float:
    """Return the learning rate of optimiser step `step` (0-based): linear warm-up, then the phase's scheduler.

    With p from 0 at the end of the warm-up (of wsd: at the last `decay_ratio` of the steps) to 1 on the last step:
    lr * (r + (1 - r) f(p)), r = min_lr_ratio, f = 1 - p (linear), (1 + cos pi p) / 2 (cosine), 1 - sqrt(p) (wsd).
    `none` and `constant` do not decay. With `steps` the schedule spans that many steps in place of the phase's, and
    its warm-up is shortened as much.

    Reference: Loshchilov and Hutter, 2017, arXiv:1608.03983 (cosine); Hu et al., 2024, arXiv:2404.06395 (warm-up,
    stable, decay); Hagele et al., 2024, arXiv:2405.18392 (its decay by 1 - sqrt).
    """
    assert phase.lr != "auto", "lr is settled for the model's width before a phase starts"
    steps = phase.steps if steps is None else steps
    warmup = phase.warmup_steps * steps // phase.steps
    if step < warmup:
        return phase.lr * (step + 1) / warmup
    if phase.scheduler in ("none", "constant"):
        return phase.lr
    last = steps - 1
    begin = warmup
    if phase.scheduler == "wsd":
        begin = max(warmup, last - max(1, round(phase.decay_ratio * steps)))
        if step <= begin:
            return phase.lr
    progress = min(1.0, (step - begin) / max(1, last - begin))
    return phase.lr * (
        phase.min_lr_ratio + (1.0 - phase.min_lr_ratio) * _remaining(phase.scheduler, progress)
    )


def _remaining(scheduler: str, progress: float) -> float:
    if scheduler == "linear":
        return 1.0 - progress
    if scheduler == "wsd":
        return 1.0 - math.sqrt(progress)
    return 0.5 * (1.0 + math.cos(math.pi * progress))
