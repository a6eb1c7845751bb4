"""The phase's optimiser over parameter groups."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from caramba.config.train import PhaseConfig
from caramba.optim.lion import Lion


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], phase: PhaseConfig) -> torch.optim.Optimizer:
    """Build the phase's optimiser over trainable parameters. Norms, biases, gates and embeddings take no weight decay.

    Reference: Loshchilov and Hutter, 2019, arXiv:1711.05101 (AdamW); Chen et al., 2023, arXiv:2302.06675 (Lion).
    """
    assert phase.lr != "auto", "lr is settled for the model's width before a phase starts"
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            (plain if parameter.ndim < 2 or "embedder" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": phase.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if phase.optimizer == "lion":
        return Lion(groups, lr=phase.lr, betas=phase.betas)
    return torch.optim.AdamW(groups, lr=phase.lr, betas=phase.betas, fused=True)
