"""Causal attention whose scores are sums of two products, for prefill and training.

Keys have a part of their own for every head and a geometric part that heads may share; neither is copied or joined.
Tiles of both parts, and of values, come in turn while products run. The backward is in `decoupled_attention_backward`.

Reference: Dao, 2023, arXiv:2307.08691 (the order of loops).
"""

from __future__ import annotations

import caramba.kernels.triton.decoupled_attention_tiles as tiles
import torch
from caramba.kernels.triton.decoupled_attention_tiles import (
    COUNTS,
    LOG2_E,
    head_of,
    keys_of,
    place_of,
    tile_of,
)
from torch import Tensor

import triton
import triton.language as tl

LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(
    acc,
    total,
    largest,
    q_sem,
    q_geo,
    k_sem,
    k_geo,
    v,
    place,
    lowest,
    begin,
    end,
    n_keys,
    sem_stride,
    geo_stride,
    v_stride,
    A: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add keys `begin` to `end`, whole tiles, to weighed values, their weights and the largest scores so far."""
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        sem = tile_of(k_sem, key, sem_stride, n_keys, A, IS_MASKED)
        geo = tile_of(k_geo, key, geo_stride, n_keys, G, IS_MASKED)
        s = tl.dot(q_geo, tl.trans(geo))
        s = tl.dot(q_sem, tl.trans(sem), s)
        if IS_MASKED:
            seen = key[None, :] <= place[:, None]
            if HAS_FIRST:
                seen = seen & (key[None, :] >= lowest[:, None])
            s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        # Rows that have seen no key yet: nothing is what they have, and not a number of infinities.
        known = tl.where(new == float("-inf"), 0.0, new) * LOG2_E if HAS_FIRST else new * LOG2_E
        p = tl.exp2(s * LOG2_E - known[:, None])
        kept = tl.exp2(largest * LOG2_E - known)
        total = total * kept + tl.sum(p, 1)
        acc = acc * kept[:, None]
        values = tile_of(v, key, v_stride, n_keys, D, IS_MASKED)
        acc = tl.dot(p.to(values.dtype), values, acc)
        largest = new
    return acc, total, largest


@triton.jit(do_not_specialize=COUNTS)
def _forward_kernel(
    q_ptr,
    k_sem_ptr,
    k_geo_ptr,
    v_ptr,
    first_ptr,
    out_ptr,
    lse_ptr,
    n_queries,
    n_keys,
    n_tiles,
    n_heads,
    n_sem,
    n_geo,
    n_v,
    q_b,
    q_t,
    q_h,
    sem_b,
    sem_t,
    sem_h,
    geo_b,
    geo_t,
    geo_h,
    v_b,
    v_t,
    v_h,
    A: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    # The longest rows of keys first: what is left for the end is short.
    tile, batch, head = place_of(n_tiles, n_heads)
    m = n_tiles - 1 - tile
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    q_at = head_of(q_ptr, batch, head, n_heads, n_heads, q_b, q_h)
    q_sem = tile_of(q_at, row, q_t, n_queries, A, True)
    q_geo = tile_of(q_at + A, row, q_t, n_queries, G, True)
    k_sem = head_of(k_sem_ptr, batch, head, n_heads, n_sem, sem_b, sem_h)
    k_geo = head_of(k_geo_ptr, batch, head, n_heads, n_geo, geo_b, geo_h)
    v = head_of(v_ptr, batch, head, n_heads, n_v, v_b, v_h)
    place, lowest, begin, whole, end = keys_of(*(first_ptr, batch, m, n_queries, n_keys, BLOCK_M, BLOCK_N, HAS_FIRST))
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if not HAS_FIRST:
        acc, total, largest = _attend(
            *(acc, total, largest, q_sem, q_geo, k_sem, k_geo, v, place, lowest, begin, whole, n_keys),
            *(sem_t, geo_t, v_t, A, G, D, BLOCK_N, HAS_FIRST, False),
        )
    acc, total, largest = _attend(
        *(acc, total, largest, q_sem, q_geo, k_sem, k_geo, v, place, lowest, whole, end, n_keys),
        *(sem_t, geo_t, v_t, A, G, D, BLOCK_N, HAS_FIRST, True),
    )
    inside = row < n_queries
    column = tl.arange(0, D)
    out_at = out_ptr + ((batch * n_queries + row) * n_heads + head)[:, None] * D + column[None, :]
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_at, out, mask=inside[:, None])
    lse_at = lse_ptr + (batch * n_heads + head) * n_queries + row
    tl.store(lse_at, largest + tl.log2(total) * LN_2, mask=inside)


def decoupled_attention(
    q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None
) -> tuple[Tensor, Tensor]:
    batch, n_queries, n_heads = q.shape[:3]
    out = q.new_empty((batch, n_queries, n_heads, v.shape[-1]))
    lse = torch.empty((batch, n_heads, n_queries), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    q, k_sem, k_geo, v = tiles.by_features(q, k_sem, k_geo, v)
    first = None if first is None else first.contiguous()
    n_keys = k_sem.shape[1]
    widths = tiles.widths_of(k_sem, k_geo, v)
    way = tiles.fitting(tiles.FORWARD, "queries", q, widths)
    n_tiles = -(-n_queries // way.queries)
    heads = (n_heads, k_sem.shape[2], k_geo.shape[2], v.shape[2])
    with torch.cuda.device_of(q):
        _forward_kernel[(n_tiles * batch * n_heads,)](
            *(q, k_sem, k_geo, v, q if first is None else first, out, lse),
            *(n_queries, n_keys, n_tiles, *heads),
            *tiles.strides_of(q, k_sem, k_geo, v),
            **widths,
            HAS_FIRST=first is not None,
            **way.options,
        )
    return out, lse
