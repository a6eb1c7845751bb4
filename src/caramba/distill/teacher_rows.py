"""A teacher's distributions of tokens, whole or as their likeliest entries, and the losses of logits against those."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.data import IGNORED

NARROW = 1 << 16
"""Entries that 16 bits number."""


@dataclass(frozen=True)
class TeacherRows:
    """A teacher's log-probabilities of some tokens, at the temperature of the loss.

    Attributes:
        log_p: [N, V], or [N, k] of the k likeliest entries.
        index: int64 [N, k], which entries these are; None when they are all, in order.
        tail: [N], mass of all other entries; None: what `log_p` leaves of 1.
    """

    log_p: Tensor
    index: Tensor | None = None
    tail: Tensor | None = None


@dataclass(frozen=True)
class StoredRows:
    """Stored likeliest entries of all tokens of a batch; a call gives rows `start` to `stop`.

    Shape: log_p [N, k], index [N, k] int32 or int16 (from -32768), tail [N].
    """

    log_p: Tensor
    index: Tensor
    tail: Tensor

    def __call__(self, start: int, stop: int) -> TeacherRows:
        part = slice(start, stop)
        index = self.index[part].long()
        if self.index.dtype == torch.int16:
            index += NARROW // 2
        return TeacherRows(self.log_p[part].to(self.tail.dtype), index, self.tail[part])


def likeliest_rows(log_p: Tensor, top_k: int, *, half: bool = False, tail: bool = True) -> dict[str, Tensor]:
    """Return what is stored of distributions: the `top_k` likeliest entries and the mass of all others.

    The mass is taken before `half` rounds to 16 bits. Without `tail` it is 0, and the entries are renormalised.

    Shape: log_p [N, V] to log_p and index [N, k], tail [N].
    """
    top = log_p.topk(top_k, dim=-1)
    values, vocab_size = top.values, log_p.shape[-1]
    if tail:
        # Where the entries are all but everything, a difference to 1 would be rounding.
        left = log_p.scatter(-1, top.indices, float("-inf")).logsumexp(-1).exp()
    else:
        left = torch.zeros_like(values[:, 0])
        values = values - values.logsumexp(-1, keepdim=True)
    is_narrow = half and vocab_size <= NARROW
    index = (top.indices - NARROW // 2).to(torch.int16) if is_narrow else top.indices.int()
    return {"log_p": values.half() if half else values, "index": index, "tail": left}


def bytes_per_token(top_k: int, vocab_size: int, *, half: bool) -> int:
    """Return the bytes of a token in `likeliest_rows`."""
    return top_k * ((2 if half else 4) + (2 if half and vocab_size <= NARROW else 4)) + 4


def likeliest_losses(
    logits: Tensor,
    rows: TeacherRows,
    targets: Tensor,
    kl: Tensor,
    ce: Tensor,
    *,
    temperature: float,
    kl_weight: float,
    writes: bool,
) -> None:
    """Write each row's T^2 KL(teacher || student) and cross-entropy; with `writes` their gradient over the logits.

    With p the k likeliest entries of the teacher, t the mass of the others, q = softmax(z / T), r the mass that q gives
    the others and S = sum p + t:

        kl = T^2 (sum_k p_k (log p_k - log q_k) + t (log t - log r))
        dz = w T (S q_v - p_v) of these entries, w T q_v (S - t / r) of the others, and (1 - w) dCE

    Shape: logits [R, V], rows of k < V entries, targets int64 [R], kl and ce [R] in fp32.
    """
    assert rows.index is not None
    assert rows.tail is not None
    counts = targets != IGNORED
    target = torch.where(counts, targets, 0)[:, None]
    z = logits.to(kl.dtype)  # a copy, which the gradient overwrites below
    log_z = z.logsumexp(-1, keepdim=True)
    ce.copy_(torch.where(counts, (log_z - z.gather(-1, target)).squeeze(-1), 0.0))
    if temperature != 1.0:
        z = z / temperature
        log_z = z.logsumexp(-1, keepdim=True)
    elif z is logits:
        z = z.clone()
    log_q = z.sub_(log_z)
    log_p, tail = rows.log_p.to(kl.dtype), rows.tail.to(kl.dtype)
    p, known = log_p.exp(), log_q.gather(-1, rows.index)
    q = log_q.exp_()
    others = q.scatter_(-1, rows.index, 0.0)  # the entries come back below
    rest = others.sum(-1).clamp_min(torch.finfo(kl.dtype).tiny)
    divergence = (p * (log_p - known)).sum(-1) + torch.xlogy(tail, tail) - torch.xlogy(tail, rest)
    kl.copy_(torch.where(counts, divergence * temperature**2, 0.0))
    if not writes:
        return
    w, total = kl_weight * temperature, (p.sum(-1) + tail)[:, None]
    has_ce, is_one = kl_weight < 1.0, temperature == 1.0
    # At a temperature of 1 cross-entropy has the same softmax.
    more = 1.0 - kl_weight if has_ce and is_one else 0.0
    grad = others.mul_(w * (total - (tail / rest)[:, None]) + more)
    grad.scatter_(-1, rows.index, (w * total + more) * known.exp() - w * p)
    if has_ce and not is_one:
        grad += (1.0 - kl_weight) * logits.to(kl.dtype).softmax(-1)
    if has_ce:
        grad.scatter_add_(-1, target, torch.full_like(log_z, kl_weight - 1.0))
    logits.copy_(grad.mul_(counts[:, None]))
