"""How much the student loses: delta = student NLL - teacher NLL, ratio = student perplexity / teacher perplexity."""

from __future__ import annotations

import torch

from caramba.config.verify import FidelityVerifyConfig
from caramba.metrics import Windows, agreement
from caramba.model import Model
from caramba.result import Check


def fidelity(
    teacher: Model,
    student: Model,
    dataset: Windows,
    config: FidelityVerifyConfig,
    device: torch.device,
) -> tuple[Check, ...]:
    """Measure both models on the same disjoint windows, over all tokens and by position in the window.

    A student that loses what is far back has a ratio that grows with the position, which short windows hide.
    Shape: items of `dataset` are (x [T], y [T]) int64.
    """
    windows = config.batches * config.batch_size
    found = agreement(teacher, student, dataset, windows=windows, batch_size=config.batch_size, device=device)
    bins = found.by_position
    return (
        Check("delta_nll", found.delta_nll, config.max_delta_nll, "nats"),
        Check("ppl_ratio", found.ppl_ratio, config.max_ppl_ratio, "ratio"),
        Check("kl", found.kl, config.max_kl, "nats"),
        Check("top1_agreement", found.top1, config.min_top1_agreement, "share", is_minimum=True),
        *(Check(f"ppl_ratio_at_{one.start}_{one.end}", one.ppl_ratio, None, "ratio") for one in bins),
        *(Check(f"kl_at_{one.start}_{one.end}", one.kl, None, "nats") for one in bins),
        *(Check(f"top1_agreement_at_{one.start}_{one.end}", one.top1, None, "share") for one in bins),
    )
