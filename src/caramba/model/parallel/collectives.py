"""Differentiable collectives at the borders of a split layer.

Each forward returns a new tensor or view: torch 2.11 compiles a function so that it also returns its intermediates. An
intermediate that is the result itself (of an in-place op, or `contiguous()` of a contiguous tensor) would receive the
result's gradient, and the argument would silently get zeros.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the function and deprecates the old name.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # A copy: other tensors may share the incoming gradient.
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
    """All-gather tokens forward; reduce-scatter or slice the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_summed: bool) -> Tensor:
        ctx.group, ctx.is_summed = group, is_summed
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        take = _scatter if ctx.is_summed else _own
        return take(gradients[0], ctx.group), None, None


class _ScatterSequence(torch.autograd.Function):
    """Reduce-scatter or slice tokens forward; all-gather the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_summed: bool) -> Tensor:
        ctx.group = group
        return (_scatter if is_summed else _own)(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradients[0], ctx.group), None, None


def gather_sequence(x: Tensor, group: dist.ProcessGroup, *, is_summed: bool) -> Tensor:
    """All-gather tokens. `is_summed` is True if each rank then does a part of the work, so gradients are summed.

    Shape: [B, T / ranks, ...] to [B, T, ...].
    """
    return _GatherSequence.apply(x, group, is_summed)


def scatter_sequence(x: Tensor, group: dist.ProcessGroup, *, is_summed: bool) -> Tensor:
    """Return this rank's tokens: of the sum over ranks if `is_summed`, otherwise of an x equal on all ranks.

    Shape: [B, T, ...] to [B, T / ranks, ...].
    """
    return _ScatterSequence.apply(x, group, is_summed)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def _scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = torch.cat(x.chunk(dist.get_world_size(group), dim=1))  # compilers support this as one collective
    own = parts.new_empty((x.shape[0], x.shape[1] // dist.get_world_size(group), *x.shape[2:]))
    _reduce_scatter(own, parts, group=group)
    return own.view_as(own)


def _own(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = x.chunk(dist.get_world_size(group), dim=1)[dist.get_rank(group)]
    return own.clone(memory_format=torch.contiguous_format)


def copy_to_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity forward; all-reduce backward (Megatron's f). x is equal on all ranks."""
    return _CopyToRegion.apply(x, group) if torch.is_grad_enabled() and x.requires_grad else x


def reduce_from_region(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce forward; identity backward (Megatron's g).

    Without gradients the all-reduce is in place.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _ReduceFromRegion.apply(x, group)
    total = x.contiguous()
    dist.all_reduce(total, group=group)
    return total


def all_gather_vocab(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gather x on the last dimension, without a gradient.

    Shape: [..., V / ranks] to [..., V].
    """
    parts = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(parts.unbind()), x.contiguous(), group=group)
    return parts.movedim(0, -2).flatten(-2)
