"""What ranks exchange at the borders of a split layer, and how gradients go back through it.

Each forward returns a tensor that nothing else in it is: torch 2.11 compiles a function so that it also returns every
tensor on the way. One of them that is the result itself, as what an operation in place returns or `contiguous()` of
what is contiguous, takes the result's gradient, and its argument has a gradient of zeros, without a word.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# By its name since torch 2.13; the older one warns there, and is all there is before.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _CopyToRegion(torch.autograd.Function):
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


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherSequence(torch.autograd.Function):
    """All ranks' tokens; the gradient of a rank's own is the sum of what all ranks have for them, or its own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_summed: bool) -> Tensor:
        ctx.group, ctx.is_summed = group, is_summed
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        take = _scatter if ctx.is_summed else _own
        return take(gradients[0], ctx.group), None, None


class _ScatterSequence(torch.autograd.Function):
    """A rank's own tokens, of the ranks' sum or of what all of them have; the gradient is that of all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_summed: bool) -> Tensor:
        ctx.group = group
        return (_scatter if is_summed else _own)(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradients[0], ctx.group), None, None


def gather_sequence(x: Tensor, group: dist.ProcessGroup, *, is_summed: bool) -> Tensor:
    """Return all ranks' tokens, for work that each does a part of (`is_summed`) or that all do alike.

    Shape: [B, T / ranks, ...] to [B, T, ...].
    """
    return _GatherSequence.apply(x, group, is_summed)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup, *, is_summed: bool) -> Tensor:
    """Return a rank's own tokens of the ranks' sum, or of an x that all have.

    Shape: [B, T, ...] to [B, T / ranks, ...].
    """
    return _ScatterSequence.apply(x, group, is_summed)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [
        torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
    ]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = torch.cat(x.chunk(dist.get_world_size(group), dim=1))  # what a compiler knows as one collective
    own = parts.new_empty((x.shape[0], x.shape[1] // dist.get_world_size(group), *x.shape[2:]))
    _reduce_scatter(own, parts, group=group)
    return own.view_as(own)


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]
    return own.clone(memory_format=torch.contiguous_format)


def copy_to_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return x, the same on all ranks, for work that each rank does a part of: its gradient is the sum of theirs."""
    return _CopyToRegion.apply(x, group) if torch.is_grad_enabled() and x.requires_grad else x


def reduce_from_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of every rank's x, on all ranks; each rank's part has the gradient of the sum.

    Without gradients the sum takes the place of x.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _ReduceFromRegion.apply(x, group)
    total = x.contiguous()
    dist.all_reduce(total, group=group)
    return total


def all_gather_vocab(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return every rank's x side by side on the last dimension. It has no gradient.

    Shape: [..., V / ranks] to [..., V].
    """
    parts = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(parts.unbind()), x.contiguous(), group=group)
    return parts.movedim(0, -2).flatten(-2)
