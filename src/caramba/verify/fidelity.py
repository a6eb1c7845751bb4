"""How much the student loses: delta = student NLL - teacher NLL, ratio = student perplexity / teacher perplexity."""

from __future__ import annotations

import math

import torch

from caramba.config.verify import FidelityVerifyConfig
from caramba.measure import Windows, windowed_nll
from caramba.model import Model
from caramba.result import Check


def fidelity(
    teacher: Model,
    student: Model,
    dataset: Windows,
    config: FidelityVerifyConfig,
    device: torch.device,
) -> tuple[Check, ...]:
    """Measure both models on the same disjoint windows. Shape: items of `dataset` are (x [T], y [T]) int64."""
    windows = config.batches * config.batch_size
    theirs = windowed_nll(teacher, dataset, windows=windows, batch_size=config.batch_size, device=device)
    ours = windowed_nll(student, dataset, windows=windows, batch_size=config.batch_size, device=device)
    delta = ours.mean - theirs.mean
    return (
        Check("delta_nll", delta, config.max_delta_nll, "nats"),
        Check("ppl_ratio", math.exp(delta), config.max_ppl_ratio, "ratio"),
    )
