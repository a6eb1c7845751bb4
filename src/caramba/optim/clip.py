"""Gradient clipping by norm or value: one pass for all norms, one per group for scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from caramba.ops import has_kernel
from caramba.ops.foreach_norm import foreach_norm, reference_foreach_norm
from caramba.optim.shards import complete_squares, is_sharded, local, sum_over_ranks

EPSILON = 1e-6  # torch's own


@torch.no_grad()
def clip_gradients(
    groups: Iterable[Sequence[nn.Parameter]],
    max_norm: float | None,
    *,
    has_stages: bool = False,
    copies: Sequence[Tensor] = (),
    hand_over: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Clip each group's gradients in place to 2-norm `max_norm`; return the total norm before clipping, [].

    Each group is scaled by min(1, max_norm / (|g| + 1e-6)), like `torch.nn.utils.clip_grad_norm_` on every group but
    with fewer launches and passes. Groups without gradients are ignored; with `max_norm` None nothing is scaled.
    Gradients are on one device, or sharded over ranks, and norms are of the whole. With `has_stages` every rank has
    different parameters in the same number of groups, and norms cover all ranks; `copies` are local parameters that
    another rank counts.
    """
    listed = [[p for p in group if p.grad is not None] for group in groups]
    listed = [group for group in listed if group]
    if not listed:
        return torch.zeros(())
    gradients = [[p.grad for p in group if p.grad is not None] for group in listed]
    every = [grad for group in gradients for grad in group]
    norms = tensor_norms(every)
    if copies:
        elsewhere = {id(copy) for copy in copies}
        counted = [id(p) not in elsewhere for group in listed for p in group]
        norms = norms * torch.tensor(counted, device=norms.device)
    sizes = [len(group) for group in gradients]
    if len(set(sizes)) == 1:  # blocks of one kind: no launch for each of them
        rows = norms.view(len(sizes), sizes[0])
    else:
        # Pad groups of fewer gradients with zeros, which do not change a norm.
        rows = nn.utils.rnn.pad_sequence(list(norms.split(sizes)), batch_first=True)
    totals = torch.linalg.vector_norm(rows, dim=1)
    if has_stages:
        totals = sum_over_ranks(totals.square()).sqrt()
    if max_norm is not None:
        scales = (max_norm / (totals + EPSILON)).clamp(max=1.0)
        if hand_over is not None and len(gradients) == 1:
            hand_over(scales[0])
            return totals[0]
        for group, scale in zip(gradients, scales.unbind(), strict=True):
            torch._foreach_mul_([local(grad) for grad in group], scale)  # pyright: ignore[reportPrivateImportUsage]
    return totals[0] if len(sizes) == 1 else torch.linalg.vector_norm(totals)


def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norms of n tensors in one pass, [n], in at least float32.

    For sharded tensors the norms are of the whole.
    """
    parts = [local(tensor) for tensor in tensors]
    norms = foreach_norm(parts) if _has_kernel(parts) else reference_foreach_norm(parts)
    if not any(is_sharded(tensor) for tensor in tensors):
        return norms
    return complete_squares(norms.square(), tensors).sqrt()


def _has_kernel(parts: Sequence[Tensor]) -> bool:
    """True if `foreach_norm` has a kernel for these tensors.

    False during CUDA graph capture, which would record addresses.
    """
    first = parts[0]
    if not has_kernel("foreach_norm", first) or (first.is_cuda and torch.cuda.is_current_stream_capturing()):
        return False
    return all(x.is_contiguous() and x.dtype != torch.float64 and x.device == first.device for x in parts)


@torch.no_grad()
def clip_values(
    groups: Iterable[Sequence[nn.Parameter]],
    limit: float,
    *,
    has_stages: bool = False,
    copies: Sequence[Tensor] = (),
) -> Tensor:
    """Clamp every element of the gradients in place to [-limit, limit], and return the norm of all before that, []."""
    listed = [list(group) for group in groups]
    norm = clip_gradients(listed, None, has_stages=has_stages, copies=copies)
    gradients = [local(p.grad) for group in listed for p in group if p.grad is not None]
    if gradients:
        torch._foreach_clamp_max_(gradients, limit)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_clamp_min_(gradients, -limit)  # pyright: ignore[reportPrivateImportUsage]
    return norm
