"""What `caramba::dba_decode` computes, in plain PyTorch: dequantise everything, mask, attend."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.ops.dequantize import dequantize


def reference_dba_decode(
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
    """Compute `dba_decode` in float32, in float64 for queries of that dtype, over all that is allocated."""
    wide = torch.promote_types(q_sem.dtype, torch.float32)
    stored = [k_sem, k_geo, *([v] if v else [])]
    streams = [read_stream(kind, parts, n_packed, wide) for kind, parts in zip(kinds, stored, strict=True)]
    n_keys = min(stream.shape[2] for stream in streams)
    lengths = seqlens.clamp(max=n_keys)
    for parts in stored:
        if len(parts) == 3 and n_packed is not None:
            lengths = torch.minimum(lengths, n_packed.clamp(0, parts[0].shape[2]) + parts[2].shape[2])
    written = (torch.arange(n_keys, device=q_sem.device) < lengths[:, None])[:, None, :, None]
    zero = torch.zeros((), dtype=wide, device=q_sem.device)
    read = [torch.where(written, stream[:, :, :n_keys], zero) for stream in streams]
    kv_heads = read[0].shape[1]
    queries = [q.to(wide).unflatten(1, (kv_heads, -1)) for q in (q_sem, q_geo)]
    scores = torch.zeros((), dtype=wide, device=q_sem.device)
    for q, k in zip(queries, read[:2], strict=True):
        scores = scores + torch.einsum("bkgtd,bksd->bkgts", q, k)
    mask = visible(lengths, q_sem.shape[2], n_keys, window)
    scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
    values = read[-1] if v else read[0]
    if null:
        rows = [row.to(wide) for row in null]
        own = sum(torch.einsum("bkgtd,kd->bkgt", q, row) for q, row in zip(queries, rows[:2], strict=True))
        scores = torch.cat((torch.as_tensor(own)[..., None], scores), dim=-1)
        first = (rows[-1] if v else rows[0])[None, :, None].expand(values.shape[0], -1, -1, -1)
        values = torch.cat((first, values), dim=2)
    return _softmax_read(scores, values, q_sem.dtype)


def _softmax_read(scores: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return softmax(scores) values and log sum exp(scores), zeros and -inf where every score is -inf."""
    sums = (
        torch.logsumexp(scores, dim=-1)
        if scores.shape[-1]
        else scores.new_full(scores.shape[:-1], -torch.inf)
    )
    safe = torch.where(sums == -torch.inf, torch.zeros_like(sums), sums)
    out = torch.einsum("bkgts,bksd->bkgtd", torch.exp(scores - safe[..., None]), values)
    return out.flatten(1, 2).to(dtype), sums.flatten(1, 2).float()


def visible(lengths: Tensor, n_queries: int, n_keys: int, window: int) -> Tensor:
    """Return which keys each query sees, [B, T, S]."""
    keys = torch.arange(n_keys, device=lengths.device)
    end = lengths[:, None] - n_queries + 1 + torch.arange(n_queries, device=lengths.device)
    mask = keys < end[..., None]
    return mask & (keys >= end[..., None] - window) if window else mask


def read_stream(kind: str, parts: list[Tensor], n_packed: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Dequantise a stored stream to [B, K, S, D], blocks then tail; unused slots are arbitrary."""
    if len(parts) == 1 or n_packed is None:
        return parts[0].to(dtype)
    codes, scales, tail = parts
    batch, kv_heads, n_tail, width = tail.shape
    n_codes = codes.shape[2]
    flat = dequantize(codes.transpose(1, 2), scales.transpose(1, 2)[..., 0], kind, kv_heads * width, dtype)
    blocks = flat.unflatten(2, (kv_heads, width)).transpose(1, 2)
    place = torch.arange(n_codes + n_tail, device=tail.device).expand(batch, -1)
    held = n_packed.clamp(0, n_codes)[:, None].expand(batch, 1).long()
    # One array of both: token u is block u, or tail u - n_packed.
    source = torch.where(place < held, place, (place - held).clamp(max=n_tail - 1) + n_codes)
    both = torch.cat((blocks, tail.to(dtype)), dim=2)
    index = source.clamp(min=0)[:, None, :, None].expand(-1, kv_heads, -1, width)
    return both.gather(2, index)
