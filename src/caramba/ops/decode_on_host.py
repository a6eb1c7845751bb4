"""`caramba::dba_decode` and `caramba::dba_append` on a CPU, which knows the lengths: only what is in use is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.kvcache import EXACT_KINDS
from caramba.ops.decode_reference import reference_dba_decode, visible


def host_dba_decode(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
    max_seqlen: int,
    n_splits: int,
) -> tuple[Tensor, Tensor]:
    """Compute `dba_decode`: plain numbers on a CPU up to the longest sequence, all else by the reference."""
    if not q_sem.is_cpu or null or any(kind not in EXACT_KINDS for kind in kinds):
        return reference_dba_decode(
            q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits
        )
    stored = [k_sem[0], k_geo[0], *v[:1]]
    n_stored = min(stream.shape[2] for stream in stored)
    counts = [min(count, n_stored) for count in seqlens.tolist()]
    (batch, heads, n_queries, _), kv_heads, n_keys = q_sem.shape, stored[0].shape[1], max(counts, default=0)
    shape = (batch, heads, n_queries)
    if n_keys < 1:
        width = (v[0] if v else k_sem[0]).shape[-1]
        return q_sem.new_zeros((*shape, width)), q_sem.new_full(shape, -torch.inf, dtype=torch.float32)
    wide = torch.promote_types(q_sem.dtype, torch.float32)
    sem, geo, *rest = (stream[:, :, :n_keys].to(wide).flatten(0, 1) for stream in stored)
    # The heads of a group, and their queries, are rows of one product with the keys that they share.
    rows = [q.to(wide).reshape(batch * kv_heads, -1, q.shape[-1]) for q in (q_sem, q_geo)]
    scores = torch.baddbmm(torch.bmm(rows[0], sem.mT), rows[1], geo.mT)
    values = rest[0] if rest else sem
    sees_all = n_queries == 1 and min(counts) == n_keys and not 0 < window < n_keys
    if not sees_all:
        lengths = torch.tensor(counts)
        mask = visible(lengths, n_queries, n_keys, window)[:, None, None]
        grouped = scores.view(batch, kv_heads, -1, n_queries, n_keys)
        scores = grouped.masked_fill_(~mask, -torch.inf).view_as(scores)
        written = (torch.arange(n_keys) < lengths[:, None]).repeat_interleave(kv_heads, 0)
        values = torch.where(written[..., None], values, 0.0)  # what lies behind a row's own may be no number
    top = scores.amax(-1, keepdim=True)
    if not sees_all:
        top.masked_fill_(top == -torch.inf, 0.0)
    shares = scores.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    sums = total.log().add_(top)
    read = torch.bmm(shares, values).div_(total if sees_all else total.masked_fill(total == 0.0, 1.0))
    return read.view(*shape, -1).to(q_sem.dtype), sums.view(shape).float()


def put(x: Tensor, into: Tensor, starts: list[int]) -> None:
    """Write token t of sequence b at place starts[b] + t, where there is one.

    Shape: x [B, K, T, D], into [B, K, S, D].
    """
    if not starts:
        return
    n_tokens, capacity = x.shape[2], into.shape[2]
    start = starts[0]
    if 0 <= start <= capacity - n_tokens and starts.count(start) == len(starts):
        into.narrow(2, start, n_tokens).copy_(x)
        return
    for t in range(n_tokens):
        inside = [(row, at + t) for row, at in enumerate(starts) if 0 <= at + t < capacity]
        if inside:
            rows, places = torch.tensor(inside).unbind(1)
            into[rows, :, places] = x[:, :, t].to(into.dtype)[rows]
