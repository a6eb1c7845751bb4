"""Launcher of `caramba::lion_step`, one launch for each tensor."""

from __future__ import annotations

from caramba.kernels.metal.library import MOST_THREADS, TYPES, find
from torch import Tensor


def lion_step(
    parameters: list[Tensor],
    momenta: list[Tensor],
    grads: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    groups = [group for group in zip(parameters, momenta, grads, strict=True) if group[0].numel()]
    if any(x.dtype not in TYPES or x.numel() > MOST_THREADS for group in groups for x in group):
        return NotImplemented
    # All that compile, before a tensor is written to.
    launches = [find("lion", P=TYPES[p.dtype], M=TYPES[m.dtype], G=TYPES[g.dtype]) for p, m, g in groups]
    numbers = tuple(map(float, (lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay)))
    for library, group in zip(launches, groups, strict=True):
        size = group[0].numel()
        library.lion_step(*group, *numbers, threads=(size,), group_size=(min(size, 256),))
    return None
