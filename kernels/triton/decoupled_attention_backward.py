"""Gradients of `decoupled_attention`: a pass over keys and one over queries, which both recompute the weights.

Nothing is added by atomics, so gradients repeat to the bit: what heads give to a key that they share is summed when all
have been written.

Reference: Dao, 2023, arXiv:2307.08691 (the order of loops).
"""

from __future__ import annotations

import caramba.kernels.triton.decoupled_attention_keys as keys
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


@triton.jit(do_not_specialize=COUNTS)
def _dots_kernel(
    grad_ptr,
    out_ptr,
    dots_ptr,
    n_queries,
    n_tiles,
    n_heads,
    grad_b,
    grad_t,
    grad_h,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Products of outputs with their gradients, [B, H, T]."""
    tile, batch, head = place_of(n_tiles, n_heads)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    grad_at = head_of(grad_ptr, batch, head, n_heads, n_heads, grad_b, grad_h)
    grad = tile_of(grad_at, row, grad_t, n_queries, D, True)
    out_at = out_ptr + (batch * n_queries * n_heads + head) * D
    out = tile_of(out_at, row, n_heads * D, n_queries, D, True)
    dots = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(dots_ptr + (batch * n_heads + head) * n_queries + row, dots, mask=row < n_queries)


@triton.jit
def _add_keys(
    grad_sem,
    grad_geo,
    q_sem,
    q_geo,
    grad,
    lse,
    dots,
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
    """Add what keys `begin` to `end` give to the gradients of a tile of queries."""
    for start in tl.range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        sem = tile_of(k_sem, key, sem_stride, n_keys, A, IS_MASKED)
        geo = tile_of(k_geo, key, geo_stride, n_keys, G, IS_MASKED)
        values = tile_of(v, key, v_stride, n_keys, D, IS_MASKED)
        s = tl.dot(q_geo, tl.trans(geo))
        s = tl.dot(q_sem, tl.trans(sem), s)
        p = tl.exp2((s - lse[:, None]) * LOG2_E)
        if IS_MASKED:
            seen = key[None, :] <= place[:, None]
            if HAS_FIRST:
                seen = seen & (key[None, :] >= lowest[:, None])
            p = tl.where(seen, p, 0.0)
        of_p = tl.dot(grad, tl.trans(values))
        of_s = (p * (of_p - dots[:, None])).to(sem.dtype)
        grad_sem = tl.dot(of_s, sem, grad_sem)
        grad_geo = tl.dot(of_s, geo, grad_geo)
    return grad_sem, grad_geo


@triton.jit(do_not_specialize=COUNTS)
def _queries_kernel(
    grad_ptr,
    q_ptr,
    k_sem_ptr,
    k_geo_ptr,
    v_ptr,
    first_ptr,
    lse_ptr,
    dots_ptr,
    grad_q_ptr,
    n_queries,
    n_keys,
    n_tiles,
    n_heads,
    n_sem,
    n_geo,
    n_v,
    grad_b,
    grad_t,
    grad_h,
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
    tile, batch, head = place_of(n_tiles, n_heads)
    m = n_tiles - 1 - tile
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    q_at = head_of(q_ptr, batch, head, n_heads, n_heads, q_b, q_h)
    q_sem = tile_of(q_at, row, q_t, n_queries, A, True)
    q_geo = tile_of(q_at + A, row, q_t, n_queries, G, True)
    grad_at = head_of(grad_ptr, batch, head, n_heads, n_heads, grad_b, grad_h)
    grad = tile_of(grad_at, row, grad_t, n_queries, D, True)
    inside = row < n_queries
    of_row = (batch * n_heads + head) * n_queries
    lse = tl.load(lse_ptr + of_row + row, mask=inside, other=0.0)
    dots = tl.load(dots_ptr + of_row + row, mask=inside, other=0.0)
    k_sem = head_of(k_sem_ptr, batch, head, n_heads, n_sem, sem_b, sem_h)
    k_geo = head_of(k_geo_ptr, batch, head, n_heads, n_geo, geo_b, geo_h)
    v = head_of(v_ptr, batch, head, n_heads, n_v, v_b, v_h)
    place, lowest, begin, whole, end = keys_of(*(first_ptr, batch, m, n_queries, n_keys, BLOCK_M, BLOCK_N, HAS_FIRST))
    grad_sem = tl.zeros((BLOCK_M, A), tl.float32)
    grad_geo = tl.zeros((BLOCK_M, G), tl.float32)
    if not HAS_FIRST:
        grad_sem, grad_geo = _add_keys(
            *(grad_sem, grad_geo, q_sem, q_geo, grad, lse, dots, k_sem, k_geo, v, place, lowest),
            *(begin, whole, n_keys, sem_t, geo_t, v_t, A, G, D, BLOCK_N, HAS_FIRST, False),
        )
    grad_sem, grad_geo = _add_keys(
        *(grad_sem, grad_geo, q_sem, q_geo, grad, lse, dots, k_sem, k_geo, v, place, lowest),
        *(whole, end, n_keys, sem_t, geo_t, v_t, A, G, D, BLOCK_N, HAS_FIRST, True),
    )
    sem_column, geo_column = tl.arange(0, A), tl.arange(0, G)
    at = grad_q_ptr + ((batch * n_queries + row) * n_heads + head)[:, None] * (A + G)
    dtype = grad_q_ptr.dtype.element_ty
    inside = inside[:, None]
    tl.store(at + sem_column[None, :], grad_sem.to(dtype), mask=inside)
    tl.store(at + A + geo_column[None, :], grad_geo.to(dtype), mask=inside)


def decoupled_attention_backward(
    grad: Tensor,
    q: Tensor,
    k_sem: Tensor,
    k_geo: Tensor,
    v: Tensor,
    first: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, n_queries, n_heads = q.shape[:3]
    if out.numel() == 0:
        return tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k_sem, k_geo, v))  # type: ignore[return-value]
    grad, q, k_sem, k_geo, v = tiles.by_features(grad, q, k_sem, k_geo, v)
    out, lse = out.contiguous(), lse.contiguous()
    n_keys, n_sem, n_geo, n_v = k_sem.shape[1], k_sem.shape[2], k_geo.shape[2], v.shape[2]
    widths = tiles.widths_of(k_sem, k_geo, v)
    dots = torch.empty_like(lse)
    grad_q = q.new_empty(q.shape)
    grad_sem, grad_geo, grad_v = (q.new_empty((batch, n_keys, n_heads, widths[name])) for name in ("A", "G", "D"))
    by_keys, by_queries = (
        tiles.fitting(tiles.KEYS, "keys", q, widths),
        tiles.fitting(tiles.QUERIES, "queries", q, widths),
    )
    n_tiles = -(-n_keys // by_keys.keys)
    ends = None
    if first is not None:
        first = first.contiguous()
        last = torch.arange(1, n_tiles + 1, device=q.device) * by_keys.keys - 1
        ends = torch.searchsorted(first, last.expand(batch, -1).contiguous(), right=True)
    has_first = first is not None
    starts = q if first is None else first
    heads = (n_heads, n_sem, n_geo, n_v)
    strides = tiles.strides_of(grad, q, k_sem, k_geo, v)
    with torch.cuda.device_of(q):
        n_dots = -(-n_queries // 64)
        _dots_kernel[(n_dots * batch * n_heads,)](
            *(grad, out, dots, n_queries, n_dots, n_heads, *grad.stride()[:3], widths["D"], 64)
        )
        keys._keys_kernel[(n_tiles * batch * n_heads,)](
            *(grad, q, k_sem, k_geo, v, starts, q if ends is None else ends, lse, dots),
            *(grad_sem, grad_geo, grad_v, n_queries, n_keys, n_tiles, *heads, *strides),
            **widths,
            HAS_FIRST=has_first,
            **by_keys.options,
        )
        n_tiles = -(-n_queries // by_queries.queries)
        _queries_kernel[(n_tiles * batch * n_heads,)](
            *(grad, q, k_sem, k_geo, v, starts, lse, dots, grad_q),
            *(n_queries, n_keys, n_tiles, *heads, *strides),
            **widths,
            HAS_FIRST=has_first,
            **by_queries.options,
        )
    return grad_q, _summed(grad_sem, k_sem), _summed(grad_geo, k_geo), _summed(grad_v, v)


def _summed(grad: Tensor, of: Tensor) -> Tensor:
    """Gradients by query head, [B, S, H, W], as those of the K heads of a stream, summed in float32."""
    n_heads = of.shape[2]
    return grad if grad.shape[2] == n_heads else grad.unflatten(2, (n_heads, -1)).sum(3)
