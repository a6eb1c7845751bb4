"""A gradient that holds the mean of gates near a target."""

from typing import Any

import torch
from torch import Tensor

WEIGHT = 1.0
"""Of the squared difference from the target, in nats."""


class _HeldRate(torch.autograd.Function):
    """Return the gates; add the gradient of WEIGHT * (mean - target)^2 to theirs, once a forward."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, target: float) -> Tensor:
        ctx.push = 2 * WEIGHT * (gates.mean() - target) / gates.numel()
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad + ctx.push, None


def hold_rate(gates: Tensor, target: float) -> Tensor:
    """Return `gates`, of any shape, whose mean training draws to `target`."""
    if not torch.is_grad_enabled() or not gates.numel():
        return gates
    return _HeldRate.apply(gates, target)
