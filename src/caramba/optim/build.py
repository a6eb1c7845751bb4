"""The optimiser of a phase, and its learning rate as a pure function of the step, which needs no state to resume."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from caramba.config.optimizer import PidaoConfig, SwatsConfig
from caramba.config.train import PhaseConfig
from caramba.optim.adamw import AdamW
from caramba.optim.groups import Named, is_sharded, is_stack_matrix, parameter_groups
from caramba.optim.lion import Lion
from caramba.optim.master_weights import MasterWeights
from caramba.optim.muon import MuonAdamW


def build_optimizer(named: Iterable[tuple[str, nn.Parameter]], phase: PhaseConfig) -> torch.optim.Optimizer:
    """Build the phase's optimiser over trainable parameters. Norms, biases, gates and embeddings take no weight decay.

    Weight decay is decoupled from the gradient but in SGD, where it is added to it as in torch. With `master_weights`
    or `stochastic_rounding` the optimiser steps bfloat16 weights in float32, through copies. AdamW needs no copies for
    stochastic rounding or for masters packed into its moments. With `optimizer_offload` it steps copies on the host.

    Reference: Loshchilov and Hutter, 2019, arXiv:1711.05101 (AdamW); Chen et al., 2023, arXiv:2302.06675 (Lion);
    Shazeer and Stern, 2018, arXiv:1804.04235 (Adafactor); Jordan et al., 2024 (Muon); Keskar and Socher, 2017,
    arXiv:1712.07628 (SWATS); Chen et al., 2024, Nature Communications 15:10263 (PIDAO).
    """
    assert phase.lr != "auto", "lr is resolved for the model's width before a phase starts"
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    if phase.orchestrator_enabled:
        from caramba.optim.portfolio import Portfolio

        return Portfolio(trained, phase, _optimizer)
    if phase.master_weights or phase.stochastic_rounding or phase.optimizer_offload:
        return MasterWeights(
            trained,
            lambda copies: _optimizer(copies, phase),
            keeps=not phase.stochastic_rounding and phase.master_weights != "in_moments",
            on_host=phase.optimizer_offload,
            in_moments=phase.master_weights == "in_moments",
        )
    return _optimizer(trained, phase)


def _optimizer(trained: list[Named], phase: PhaseConfig) -> torch.optim.Optimizer:
    lr, momentum = float(phase.lr), phase.optimizer_momentum
    if not isinstance(phase.optimizer, str):
        from caramba.config.extension import build_extension

        own = [group | {"lr": lr} for group in parameter_groups(trained, phase.weight_decay, phase.lr_mult)]
        return build_extension(phase.optimizer, own, phase.optimizer)
    if phase.optimizer == "muon":
        matrices = [pair for pair in trained if is_stack_matrix(*pair)]
        others = [pair for pair in trained if not is_stack_matrix(*pair)]
        return MuonAdamW(
            parameter_groups(matrices, phase.weight_decay, phase.lr_mult),
            parameter_groups(others, phase.weight_decay, phase.lr_mult),
            lr=lr,
            momentum=momentum,
            betas=phase.betas,
        )
    groups = parameter_groups(trained, phase.weight_decay, phase.lr_mult)
    way: dict[str, Any] = {"fused": True} if phase.fused_optimizer else {"fused": False, "foreach": False}
    if phase.optimizer == "lion":
        return Lion(groups, lr=lr, betas=phase.betas)
    if phase.optimizer == "swats":
        from caramba.optim.swats import SWATS

        return SWATS(groups, lr=lr, betas=phase.betas, tolerance=(phase.swats or SwatsConfig()).tolerance)
    if phase.optimizer in ("pidao", "pidao_adaptive"):
        from caramba.optim.pidao import PIDAO

        gains = (phase.pidao or PidaoConfig()).model_dump()
        adaptive = phase.optimizer == "pidao_adaptive"
        return PIDAO(groups, lr=lr, adaptive=adaptive, beta2=phase.betas[1], **gains)
    if phase.optimizer == "sgd":
        if phase.fused_optimizer and any(is_sharded(parameter) for _, parameter in trained):
            way = {"fused": False, "foreach": True}  # torch's fused SGD knows no sharded weights
        return torch.optim.SGD(groups, lr=lr, momentum=momentum, **way)
    if phase.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    if phase.fused_optimizer:
        return AdamW(groups, lr=lr, betas=phase.betas)
    return torch.optim.AdamW(groups, lr=lr, betas=phase.betas, **way)


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
    return phase.lr * (phase.min_lr_ratio + (1.0 - phase.min_lr_ratio) * _remaining(phase.scheduler, progress))


def _remaining(scheduler: str, progress: float) -> float:
    if scheduler == "linear":
        return 1.0 - progress
    if scheduler == "wsd":
        return 1.0 - math.sqrt(progress)
    return 0.5 * (1.0 + math.cos(math.pi * progress))
