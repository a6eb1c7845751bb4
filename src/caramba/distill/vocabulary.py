"""Losses over the vocabulary, in chunks of tokens: the logits of a whole batch never exist at one time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.data import IGNORED
from caramba.distill.teacher_rows import StoredRows, TeacherRows, sparse_losses
from caramba.lower.lowering import has_hooks
from caramba.model import Model
from caramba.ops.backend import upcast
from caramba.ops.distillation_rows import distillation_rows
from caramba.ops.linear_cross_entropy import accumulate, rows_per_chunk

RowsOf = Callable[[int, int], TeacherRows]


@dataclass(frozen=True)
class VocabularyLosses:
    """Means over the tokens that count: what is minimised, and its parts (`kl` without a teacher is None)."""

    loss: Tensor
    ce: Tensor
    kl: Tensor | None = None


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats, in at least fp32; targets of -100 do not count.

    Shape: logits [..., V], targets [...] -> [].
    """
    kept = (targets != IGNORED).sum().clamp_min(1)
    return _cross_entropies(upcast(logits.flatten(0, -2)), targets.flatten()).sum() / kept


def teacher_kl(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) in nats, mean over tokens, times temperature^2 (Hinton et al., 2015, arXiv:1503.02531).

    Shape: both [..., V] -> []. Computed in at least fp32.
    """
    theirs = F.log_softmax(upcast(teacher_logits.flatten(0, -2)) / temperature, dim=-1)
    return _divergences(upcast(student_logits.flatten(0, -2)), TeacherRows(theirs), temperature).mean()


def vocabulary_losses(
    model: Model,
    hidden: Tensor,
    targets: Tensor,
    *,
    rows: RowsOf | None = None,
    kl_weight: float = 0.0,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> VocabularyLosses:
    """Losses of the head on features: (1 - w) CE + w T^2 KL(teacher || student), means over tokens that count.

    Gradients are computed chunk by chunk in the forward, so that only [chunk, V] and the gradients of the features and
    of the head's own weights are stored.

    Args:
        hidden: features before the head.
        targets: next tokens; -100 does not count.
        rows: gives the teacher's rows start to stop of the flattened tokens; None when there is no teacher.
        kl_weight: w.

    Shape: hidden [B, T, M], targets [B, T] -> [] each.
    """
    weight, flat = model.head_weight, hidden.flatten(0, 1)
    if weight is not None and hidden.is_cuda and has_bare_head(model):
        given = targets.flatten()
        if isinstance(rows, LiveTeacher) and has_bare_head(rows.model):
            return distill_heads(flat, weight, rows, given, kl_weight=kl_weight, temperature=temperature)
        if isinstance(rows, StoredRows):
            return distill_stored(flat, weight, rows, given, kl_weight=kl_weight, temperature=temperature)
    part = _Part(model, targets.flatten(), rows, kl_weight, temperature, chunk)
    weights = list(model.head.parameters()) or [model.embedder.token.weight]  # of a tied head
    loss, ce, kl = _ChunkedLosses.apply(part, flat, *weights)  # type: ignore[misc]
    return VocabularyLosses(loss, ce, None if rows is None else kl)


@dataclass(frozen=True)
class LiveTeacher:
    """A teacher's rows from its features before the head, made when a chunk asks for them.

    Shape: hidden [N, M of the teacher].
    """

    model: Model
    hidden: Tensor
    temperature: float

    def __call__(self, start: int, stop: int) -> TeacherRows:
        logits = upcast(self.model.logits(self.hidden[start:stop]))
        return TeacherRows(F.log_softmax(logits / self.temperature, dim=-1))


def has_bare_head(model: Model) -> bool:
    """True if the head is one product of an unsharded weight, and no hook watches it."""
    return type(model.head_weight) is nn.Parameter and not has_hooks(model.head)


def distill_heads(
    hidden: Tensor,
    weight: Tensor,
    teacher: LiveTeacher,
    targets: Tensor,
    *,
    kl_weight: float,
    temperature: float,
    chunk: int | None = None,
) -> VocabularyLosses:
    """Return w T^2 KL(teacher || student) + (1 - w) CE of two plain heads, means over the counted targets.

    Per chunk: one product for each head, `distillation_rows`, and two products for the gradients, which overwrite the
    student's logits. Logits have the dtype of autocast, else that of `hidden`; softmax is in fp32.

    Shape: hidden [N, M], weight [V, M], targets [N] -> [] each.
    """
    assert teacher.model.head_weight is not None
    their_hidden, their_weight = teacher.hidden.detach(), teacher.model.head_weight.detach()

    def fill(logits: Tensor, part: slice, kl: Tensor, ce: Tensor, writes: bool) -> None:
        distillation_rows(
            logits,
            their_hidden[part].to(logits.dtype) @ their_weight.to(logits.dtype).t(),
            targets[part],
            kl,
            ce,
            ignore_index=IGNORED,
            temperature=temperature,
            kl_weight=kl_weight,
            writes=writes,
        )

    loss, ce, kl = _FusedDistillation.apply(hidden, weight, fill, targets, kl_weight, 2, chunk)  # type: ignore[misc]
    return VocabularyLosses(loss, ce, kl)


def distill_stored(
    hidden: Tensor,
    weight: Tensor,
    rows: StoredRows,
    targets: Tensor,
    *,
    kl_weight: float,
    temperature: float,
    chunk: int | None = None,
) -> VocabularyLosses:
    """Return the losses of `distill_heads` against a teacher's stored entries, without any product of a teacher.

    Shape: hidden [N, M], weight [V, M], rows of N tokens, targets [N] -> [] each.
    """

    def fill(logits: Tensor, part: slice, kl: Tensor, ce: Tensor, writes: bool) -> None:
        theirs = rows(part.start, part.stop)
        sparse_losses(
            logits, theirs, targets[part], kl, ce, temperature=temperature, kl_weight=kl_weight, writes=writes
        )

    loss, ce, kl = _FusedDistillation.apply(hidden, weight, fill, targets, kl_weight, 2, chunk)  # type: ignore[misc]
    return VocabularyLosses(loss, ce, kl)


Fill = Callable[[Tensor, slice, Tensor, Tensor, bool], None]
"""Writes KL and cross-entropy of a chunk of logits, and replaces these by their gradient."""


class _FusedDistillation(torch.autograd.Function):
    """Makes the gradients in the forward; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        fill: Fill,
        targets: Tensor,
        kl_weight: float,
        n_copies: int,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        device = hidden.device.type
        is_autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_autocast else hidden.dtype
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        with torch.autocast(device, enabled=False):
            features, matrix = hidden.detach().to(dtype), weight.detach().to(dtype)
            rows = rows_per_chunk(features, n_copies * len(matrix)) if chunk is None else chunk
            wide = torch.promote_types(dtype, torch.float32)
            kl, ce = (torch.empty(len(features), dtype=wide, device=hidden.device) for _ in range(2))
            kept = (targets != IGNORED).sum().clamp_min(1)
            grad_hidden = torch.empty_like(features) if wants_hidden else None
            # Sums over all tokens are in at least fp32: they grow with the batch.
            grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wants_weight else None
            for start in range(0, len(features), rows):
                part = slice(start, min(start + rows, len(features)))
                logits = features[part] @ matrix.t()
                fill(logits, part, kl[part], ce[part], wants_hidden or wants_weight)
                if grad_hidden is not None:
                    torch.mm(logits, matrix, out=grad_hidden[part])
                if grad_weight is not None:
                    accumulate(grad_weight, logits.t(), features[part], beta=float(start > 0), alpha=1.0)
            ctx.grads = (grad_hidden, grad_weight)
            ctx.kept, ctx.dtypes = kept, (hidden.dtype, weight.dtype)
            kl_mean, ce_mean = kl.sum() / kept, ce.sum() / kept
            loss = kl_weight * kl_mean + (1.0 - kl_weight) * ce_mean if kl_weight < 1.0 else kl_mean.clone()
            ctx.mark_non_differentiable(ce_mean, kl_mean)
            return loss, ce_mean, kl_mean

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        scale = upstream[0] / ctx.kept
        grads, ctx.grads = ctx.grads, None
        scaled = [
            None if grad is None else (upcast(grad) * scale).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None, None, None, None


@dataclass(frozen=True)
class _Part:
    model: Model
    targets: Tensor
    rows: RowsOf | None
    kl_weight: float
    temperature: float
    chunk: int

    def sums(self, hidden: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums over tokens start to stop: what is minimised, CE and KL."""
        targets = self.targets[start:stop]
        logits = upcast(self.model.logits(hidden))
        weighs_ce = self.kl_weight < 1.0
        with torch.set_grad_enabled(weighs_ce and torch.is_grad_enabled()):
            ce = _cross_entropies(logits, targets).sum()
        if self.rows is None:
            return ce, ce, torch.zeros_like(ce)
        with torch.no_grad():
            rows = self.rows(start, stop)
        counts = targets != IGNORED
        kl = torch.where(counts, _divergences(logits, rows, self.temperature), 0.0).sum()
        loss = self.kl_weight * kl + (1.0 - self.kl_weight) * ce if weighs_ce else kl
        return loss, ce, kl


class _ChunkedLosses(torch.autograd.Function):
    """Runs the head and the losses chunk by chunk; its backward scales the gradients that the forward kept."""

    @staticmethod
    def forward(ctx: Any, part: _Part, hidden: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        wanted = ctx.needs_input_grad[1:]
        kept = (part.targets != IGNORED).sum().clamp_min(1)
        sums: list[Tensor] = []
        hidden_grad = torch.zeros_like(hidden) if wanted[0] else None
        grads: list[Tensor | None] = [
            torch.zeros_like(weight) if want else None for weight, want in zip(weights, wanted[1:], strict=True)
        ]
        for start in range(0, len(hidden), part.chunk):
            stop = min(start + part.chunk, len(hidden))
            with torch.set_grad_enabled(any(wanted)):
                piece = hidden[start:stop].detach().requires_grad_(bool(wanted[0]))
                losses = part.sums(piece, start, stop)
            if any(wanted):
                inputs = [tensor for tensor, want in zip((piece, *weights), wanted, strict=True) if want]
                found = iter(torch.autograd.grad(losses[0], inputs, allow_unused=True))
                if hidden_grad is not None:
                    hidden_grad[start:stop] = next(found)
                _add(grads, found)
            sums.append(torch.stack([loss.detach() for loss in losses]))
        means = torch.stack(sums).sum(0) / kept
        ctx.grads = [None if grad is None else grad.div_(kept) for grad in (hidden_grad, *grads)]
        loss, ce, kl = means.unbind()
        loss, ce, kl = loss.clone(), ce.clone(), kl.clone()
        ctx.mark_non_differentiable(ce, kl)
        return loss, ce, kl

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        scale = upstream[0]
        grads, ctx.grads = ctx.grads, None
        return None, *(None if grad is None else grad.mul_(scale) for grad in grads)


def _add(grads: Sequence[Tensor | None], found: Any) -> None:
    for total in grads:
        if total is not None:
            grad = next(found)
            if grad is not None:
                total.add_(grad)


def _cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)


def _divergences(logits: Tensor, rows: TeacherRows, temperature: float) -> Tensor:
    """KL(teacher || student) of each token, times temperature^2; an unbiased estimate where entries are stored.

    Shape: logits [N, V] -> [N].
    """
    log_q = F.log_softmax(logits / temperature, dim=-1)
    log_p = rows.log_p.to(log_q.dtype)
    if rows.index is None:
        return (log_p.exp() * (log_p - log_q)).sum(-1) * temperature**2
    assert rows.weight is not None
    gap = log_p - log_q.gather(-1, rows.index)
    return (rows.weight.to(gap.dtype) * gap).sum(-1) * temperature**2
