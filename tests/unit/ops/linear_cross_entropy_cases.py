"""Inputs of linear_cross_entropy and the dense answer in float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def drawn(n: int, m: int, v: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Features, weights and targets, of which every third is ignored."""
    generator = torch.Generator().manual_seed(n * 1000 + v)
    hidden = torch.randn(n, m, generator=generator).to(device, dtype)
    weight = torch.randn(v, m, generator=generator).mul_(2 * m**-0.5).to(device, dtype)
    targets = torch.randint(v, (n,), generator=generator)
    targets[1::3] = -100
    return hidden, weight, targets.to(device)


def dense(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over the tokens that count, and its gradients, by autograd over all logits in float64."""
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    with torch.enable_grad():
        logits = scale * h @ w.t()
        counts = targets != -100
        ce = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        total = ce + z_loss * (logits.logsumexp(-1).square() * counts).sum()
        grads = torch.autograd.grad(total, (h, w))
    return total.detach(), *grads
