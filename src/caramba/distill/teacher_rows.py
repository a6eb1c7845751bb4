"""A teacher's distributions of tokens, whole or as entries that are stored, and the losses of logits against those."""

from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.data import IGNORED
from caramba.ops.linear_cross_entropy import cross_entropy_rows

NARROW = 1 << 16
"""Entries that 16 bits number."""
TAIL_SAMPLES = 32
"""Samples of all but the likeliest entries, unless a config sets another number."""
GOLDEN = 0.6180339887498949
LEAST = -1e4
"""Least log-probability that is stored: 16 bits hold it, and its entry weighs nothing."""


@dataclass(frozen=True)
class TeacherRows:
    """A teacher's log-probabilities of some tokens, at the temperature of the loss.

    Attributes:
        log_p: [N, V], or [N, k] of stored entries.
        index: int64 [N, k], which entries these are; None when they are all, in order.
        weight: [N, k], what each stored entry counts for in the mean over the teacher's distribution; sums to 1.
        n_top: how many of the stored entries, the first, are the likeliest. Those after them may repeat.
    """

    log_p: Tensor
    index: Tensor | None = None
    weight: Tensor | None = None
    n_top: int = 0


@dataclass(frozen=True)
class StoredRows:
    """Stored entries of all tokens of a batch; a call gives rows `start` to `stop`.

    The last `n_samples` entries are samples of all but the others, and share the mass `tail`.

    Shape: log_p [N, k], index [N, k] int32 or int16 (from -32768), tail [N].
    """

    log_p: Tensor
    index: Tensor
    tail: Tensor
    n_samples: int = 0

    def __call__(self, start: int, stop: int) -> TeacherRows:
        part = slice(start, stop)
        index, tail = self.index[part].long(), self.tail[part, None]
        if self.index.dtype == torch.int16:
            index += NARROW // 2
        log_p = self.log_p[part].to(tail.dtype)
        n_top = log_p.shape[-1] - self.n_samples
        weight = log_p.exp()
        if self.n_samples:
            weight[:, n_top:] = tail / self.n_samples
        # 16 bits round the entries, so they do not quite sum to what the tail leaves.
        return TeacherRows(log_p, index, weight / weight.sum(-1, keepdim=True), n_top)


def n_entries(top_k: int, samples: int, vocab_size: int, *, tail: bool = True) -> tuple[int, int]:
    """Return how many likeliest entries and how many samples of the others are stored.

    A vocabulary of no more than both is stored whole; without `tail` there are no samples.
    """
    if not tail:
        return min(top_k, vocab_size), 0
    return (vocab_size, 0) if vocab_size <= top_k + samples else (top_k, samples)


def sparse_rows(log_p: Tensor, top_k: int, samples: int, places: Tensor, *, half: bool = False) -> dict[str, Tensor]:
    """Return what is stored of distributions: the `top_k` likeliest entries, and `samples` of the others by their mass.

    A mean over the stored entries, with the weights of `StoredRows`, is an unbiased estimate of that over the whole
    distribution: of the KL and of its gradient. Entries are sampled at even steps of the cumulated mass, whose
    offset follows from `places` alone (multiples of the golden ratio), so that no random state is touched. Without
    samples the entries are renormalised. `tail` is the exact mass of the others, before `half` rounds to 16 bits.

    Shape: log_p [N, V], places int64 [N] to log_p and index [N, top_k + samples], tail [N].

    Reference: Anshumann et al., 2025, arXiv:2503.16870 (samples in place of a truncated distribution).
    """
    vocab_size = log_p.shape[-1]
    values, index = log_p.topk(top_k, dim=-1)
    tail = torch.zeros_like(values[:, 0])
    if samples:
        mass = log_p.exp().scatter_(-1, index, 0.0).cumsum(-1)
        tail = mass[:, -1].clone()
        offset = torch.frac((places.double() + 1) * GOLDEN)[:, None]
        steps = (torch.arange(samples, device=log_p.device) + offset) / samples
        sampled = torch.searchsorted(mass, steps.to(mass.dtype) * tail[:, None], right=True)
        sampled = sampled.clamp_(max=vocab_size - 1)
        values, index = torch.cat((values, log_p.gather(-1, sampled)), -1), torch.cat((index, sampled), -1)
    else:
        values = values - values.logsumexp(-1, keepdim=True)
    values = values.clamp(min=LEAST)
    is_narrow = half and vocab_size <= NARROW
    index = (index - NARROW // 2).to(torch.int16) if is_narrow else index.int()
    return {"log_p": values.half() if half else values, "index": index, "tail": tail}


def bytes_per_token(entries: int, vocab_size: int, *, half: bool) -> int:
    """Return the bytes of a token in `sparse_rows`."""
    return entries * ((2 if half else 4) + (2 if half and vocab_size <= NARROW else 4)) + 4


def sparse_losses(
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

    With stored entries e(1..k), their weights a and q = softmax(z / T):

        kl = T^2 sum_k a_k (log p_k - log q_e(k))
        dz_v = w T (q_v - sum of a_k where e(k) = v) + (1 - w) dCE_v

    Shape: logits [R, V], rows of k entries, targets int64 [R], kl and ce [R] in fp32.
    """
    assert rows.index is not None
    assert rows.weight is not None
    live = (targets != IGNORED)[:, None]
    target = torch.where(live, targets[:, None], 0)
    log_p, weight = rows.log_p.to(kl.dtype), rows.weight.to(kl.dtype)
    if temperature != 1.0:
        log_q = (logits.to(kl.dtype) / temperature).log_softmax(-1)
        gap = log_p - log_q.gather(-1, rows.index)
        kl.copy_(torch.where(live, weight * gap, 0.0).sum(-1) * temperature**2)
        cross_entropy_rows(kept := logits.clone(), targets, ce, ignore_index=IGNORED, writes=writes and kl_weight < 1.0)
        if writes:
            grad = log_q.exp_().scatter_add_(-1, rows.index, -weight).mul_(kl_weight * temperature).mul_(live)
            logits.copy_(grad.add_(kept.to(kl.dtype), alpha=1.0 - kl_weight) if kl_weight < 1.0 else grad)
        return
    # Read before the gradient overwrites them.
    known = logits.gather(-1, torch.cat((rows.index, target), dim=-1)).to(kl.dtype)
    cross_entropy_rows(logits, targets, ce, ignore_index=IGNORED, writes=writes)
    log_q = known - known[:, -1:] - ce[:, None]
    kl.copy_(torch.where(live, weight * (log_p - log_q[:, :-1]), 0.0).sum(-1))
    if not writes:
        return
    # The row holds softmax - onehot, rounded. Entries with a weight of their own are made again from the float32 ones.
    top, rest = rows.index[:, : rows.n_top], rows.index[:, rows.n_top :]
    q, of_ce = log_q.exp(), 1.0 - kl_weight
    of_top = q[:, : rows.n_top] - kl_weight * weight[:, : rows.n_top] - of_ce * (top == target).to(q.dtype)
    for place, grad in ((target, q[:, -1:] - of_ce), (top, of_top)):
        logits.scatter_(-1, place, grad.mul_(live).to(logits.dtype))
    logits.scatter_add_(-1, rest, (weight[:, rows.n_top :] * -kl_weight).mul_(live).to(logits.dtype))
