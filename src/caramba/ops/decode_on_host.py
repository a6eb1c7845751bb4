"""`caramba::dba_decode` and `caramba::dba_append` on a CPU, which knows the lengths: only what is in use is touched."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.kvcache import EXACT_KINDS
from caramba.ops.decode_reference import reference_dba_decode, visible
from caramba.ops.dequantize import dequantize


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
    """Compute `dba_decode`: on a CPU numbers of all sequences at once, blocks of each by itself, up to what it stores;
    elsewhere by the reference."""
    if not q_sem.is_cpu:
        return reference_dba_decode(
            q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits
        )
    if null or any(kind not in EXACT_KINDS for kind in kinds):
        streams = list(zip(kinds, [k_sem, k_geo, *([v] if v else [])], strict=True))
        return _sequence_by_sequence(q_sem, q_geo, streams, seqlens, n_packed, null, window)
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
        values = torch.where(written[..., None], values, 0.0)  # slots after a row's length may contain NaN
    top = scores.amax(-1, keepdim=True)
    if not sees_all:
        top.masked_fill_(top == -torch.inf, 0.0)
    shares = scores.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    sums = total.log().add_(top)
    read = torch.bmm(shares, values).div_(total if sees_all else total.masked_fill(total == 0.0, 1.0))
    return read.view(*shape, -1).to(q_sem.dtype), sums.view(shape).float()


def _sequence_by_sequence(
    q_sem: Tensor,
    q_geo: Tensor,
    streams: list[tuple[str, list[Tensor]]],
    seqlens: Tensor,
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
) -> tuple[Tensor, Tensor]:
    """Compute `dba_decode` of streams in any formats: each sequence's own tokens, and no others, become numbers."""
    (batch, heads, n_queries, _), kv_heads = q_sem.shape, streams[0][1][-1].shape[1]
    wide = torch.promote_types(q_sem.dtype, torch.float32)
    v_width = streams[-1][1][-1].shape[-1] if len(streams) > 2 else q_sem.shape[-1]
    out = q_sem.new_zeros((batch, heads, n_queries, v_width))
    sums = q_sem.new_full((batch, heads, n_queries), -torch.inf, dtype=torch.float32)
    rows = [row.to(wide)[:, None] for row in null]
    packed = [0] * batch if n_packed is None else n_packed.expand(batch).tolist()
    for b, (length, held) in enumerate(zip(seqlens.tolist(), packed, strict=True)):
        for _, parts in streams:
            held = max(0, min(held, parts[0].shape[2])) if len(parts) == 3 else held
        for _, parts in streams:
            length = min(length, held + parts[2].shape[2] if len(parts) == 3 else parts[0].shape[2])
        if length < 1 and not rows:
            continue
        length = max(0, length)
        numbers = [_numbers(kind, parts, b, length, min(held, length), wide) for kind, parts in streams]
        queries = [q[b].to(wide).reshape(kv_heads, -1, q.shape[-1]) for q in (q_sem, q_geo)]
        # Keys that are one row for all tokens, as zeros may be, make one score.
        scores = sum(torch.bmm(q, k.mT) for q, k in zip(queries, numbers[:2], strict=True))
        assert isinstance(scores, Tensor)
        if scores.shape[-1] != length:
            scores = scores.expand(*scores.shape[:2], length)
        if n_queries > 1 or 0 < window < length:
            mask = visible(torch.tensor([length]), n_queries, length, window)[0]
            scores = (
                scores.reshape(kv_heads, heads // kv_heads, n_queries, length)
                .masked_fill(~mask, -torch.inf)
                .flatten(1, 2)
            )
        values = numbers[-1 if len(numbers) > 2 else 0].expand(-1, length, -1)
        if rows:
            own = sum(torch.bmm(q, row.mT) for q, row in zip(queries, rows[:2], strict=True))
            assert isinstance(own, Tensor)
            scores = torch.cat((own, scores), dim=-1)
            values = torch.cat((rows[-1 if len(rows) > 2 else 0], values), dim=1)
        total = torch.logsumexp(scores, dim=-1)
        top = total.masked_fill(total == -torch.inf, 0.0)
        read = torch.bmm((scores - top[..., None]).exp_(), values)
        out[b] = read.reshape(heads, n_queries, v_width)
        sums[b] = total.reshape(heads, n_queries)
    return out, sums


def _numbers(kind: str, parts: list[Tensor], b: int, length: int, held: int, dtype: torch.dtype) -> Tensor:
    """Dequantise the first `length` tokens of a sequence, of which `n_packed` are in blocks: [K, length, D].

    Of a stream whose tokens are all one row in memory, that row: [K, 1, D].
    """
    if len(parts) == 1:
        is_one = parts[0].stride(2) == 0 and length > 0
        return parts[0][b, :, : 1 if is_one else length].to(dtype)
    codes, scales, tail = parts
    kv_heads, _, width = tail.shape[1:]
    recent = tail[b, :, : length - held].to(dtype)
    if not held:
        return recent
    rows = codes[b, None, :, :held].transpose(1, 2), scales[b, None, :, :held, 0].transpose(1, 2)
    blocks = dequantize(*rows, kind, kv_heads * width, dtype)[0].unflatten(1, (kv_heads, width))
    return torch.cat((blocks.transpose(0, 1), recent), dim=1)


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
