"""What ranks exchange at the borders of a split layer, and how gradients go back through it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Entering(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A copy: the gradient that comes in may be that of other tensors too.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Leaving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def entering(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, the same on all ranks, for work that each rank does a part of: its gradient is the sum of theirs."""
    return _Entering.apply(x, group) if torch.is_grad_enabled() and x.requires_grad else x


def leaving(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of every rank's x, on all ranks; each rank's part has the gradient of the sum.

    Without gradients the sum takes the place of x.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _Leaving.apply(x, group)
    total = x.contiguous()
    dist.all_reduce(total, group=group)
    return total


def joined(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's x side by side on the last dimension. It has no gradient.

    Shape: [..., V / ranks] to [..., V].
    """
    parts = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(parts.unbind()), x.contiguous(), group=group)
    return parts.movedim(0, -2).flatten(-2)
