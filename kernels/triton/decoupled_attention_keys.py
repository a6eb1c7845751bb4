"""Gradients of the keys and values of `decoupled_attention`: a program holds a tile of them and walks over queries."""

from __future__ import annotations

from caramba.kernels.triton.decoupled_attention_tiles import COUNTS, LOG2_E, head_of, place_of, tile_of

import triton
import triton.language as tl


@triton.jit
def _add_queries(
    grad_sem,
    grad_geo,
    grad_v,
    k_sem,
    k_geo,
    v,
    q_at,
    grad_at,
    lse_at,
    dots_at,
    first_at,
    key,
    begin,
    end,
    n_queries,
    n_keys,
    q_t,
    grad_t,
    A: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Add what queries `begin` to `end` give to the gradients of a tile of keys and values."""
    for start in tl.range(begin, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        q_sem = tile_of(q_at, row, q_t, n_queries, A, IS_MASKED)
        q_geo = tile_of(q_at + A, row, q_t, n_queries, G, IS_MASKED)
        grad = tile_of(grad_at, row, grad_t, n_queries, D, IS_MASKED)
        if IS_MASKED:
            lse = tl.load(lse_at + row, mask=row < n_queries, other=0.0)
            dots = tl.load(dots_at + row, mask=row < n_queries, other=0.0)
        else:
            lse = tl.load(lse_at + row)
            dots = tl.load(dots_at + row)
        s = tl.dot(k_geo, tl.trans(q_geo))
        s = tl.dot(k_sem, tl.trans(q_sem), s)
        p = tl.exp2((s - lse[None, :]) * LOG2_E)
        if IS_MASKED:
            seen = (key[:, None] <= (row + (n_keys - n_queries))[None, :]) & (row < n_queries)[None, :]
            if HAS_FIRST:
                lowest = tl.load(first_at + row, mask=row < n_queries, other=0).to(tl.int32)
                seen = seen & (key[:, None] >= lowest[None, :])
            p = tl.where(seen, p, 0.0)
        grad_v = tl.dot(p.to(grad.dtype), grad, grad_v)
        of_p = tl.dot(v, tl.trans(grad))
        of_s = (p * (of_p - dots[None, :])).to(q_sem.dtype)
        grad_sem = tl.dot(of_s, q_sem, grad_sem)
        grad_geo = tl.dot(of_s, q_geo, grad_geo)
    return grad_sem, grad_geo, grad_v


@triton.jit(do_not_specialize=COUNTS)
def _keys_kernel(
    grad_ptr,
    q_ptr,
    k_sem_ptr,
    k_geo_ptr,
    v_ptr,
    first_ptr,
    ends_ptr,
    lse_ptr,
    dots_ptr,
    grad_sem_ptr,
    grad_geo_ptr,
    grad_v_ptr,
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
    """Gradients of a tile of keys and values, by query head."""
    tile, batch, head = place_of(n_tiles, n_heads)
    start = tile * BLOCK_N  # early keys, which most queries see, come first
    key = start + tl.arange(0, BLOCK_N)
    before = n_keys - n_queries
    begin = tl.maximum(start - before, 0) // BLOCK_M * BLOCK_M
    end = n_queries
    if HAS_FIRST:
        end = tl.load(ends_ptr + batch * n_tiles + tile).to(tl.int32)
    # From `seeing` on every query sees the whole tile, and up to `rest` rows are whole tiles.
    seeing = tl.minimum(tl.cdiv(tl.maximum(start + BLOCK_N - 1 - before, 0), BLOCK_M) * BLOCK_M, end)
    rest = tl.maximum(end // BLOCK_M * BLOCK_M, seeing)
    if HAS_FIRST or start + BLOCK_N > n_keys:
        seeing = end
        rest = end
    k_sem_at = head_of(k_sem_ptr, batch, head, n_heads, n_sem, sem_b, sem_h)
    k_geo_at = head_of(k_geo_ptr, batch, head, n_heads, n_geo, geo_b, geo_h)
    v_at = head_of(v_ptr, batch, head, n_heads, n_v, v_b, v_h)
    k_sem = tile_of(k_sem_at, key, sem_t, n_keys, A, True)
    k_geo = tile_of(k_geo_at, key, geo_t, n_keys, G, True)
    v = tile_of(v_at, key, v_t, n_keys, D, True)
    q_at = head_of(q_ptr, batch, head, n_heads, n_heads, q_b, q_h)
    grad_at = head_of(grad_ptr, batch, head, n_heads, n_heads, grad_b, grad_h)
    of_row = (batch * n_heads + head) * n_queries
    lse_at, dots_at, first_at = lse_ptr + of_row, dots_ptr + of_row, first_ptr + batch * n_queries
    grad_sem = tl.zeros((BLOCK_N, A), tl.float32)
    grad_geo = tl.zeros((BLOCK_N, G), tl.float32)
    grad_v = tl.zeros((BLOCK_N, D), tl.float32)
    grad_sem, grad_geo, grad_v = _add_queries(
        *(grad_sem, grad_geo, grad_v, k_sem, k_geo, v, q_at, grad_at, lse_at, dots_at, first_at, key),
        *(begin, seeing, n_queries, n_keys, q_t, grad_t, A, G, D, BLOCK_M),
        *(HAS_FIRST, True),
    )
    if not HAS_FIRST:
        grad_sem, grad_geo, grad_v = _add_queries(
            *(grad_sem, grad_geo, grad_v, k_sem, k_geo, v, q_at, grad_at, lse_at, dots_at, first_at, key),
            *(seeing, rest, n_queries, n_keys, q_t, grad_t, A, G, D, BLOCK_M),
            *(HAS_FIRST, False),
        )
        grad_sem, grad_geo, grad_v = _add_queries(
            *(grad_sem, grad_geo, grad_v, k_sem, k_geo, v, q_at, grad_at, lse_at, dots_at, first_at, key),
            *(rest, end, n_queries, n_keys, q_t, grad_t, A, G, D, BLOCK_M),
            *(HAS_FIRST, True),
        )
    at = ((batch * n_keys + key) * n_heads + head)[:, None]
    inside = (key < n_keys)[:, None]
    dtype = grad_sem_ptr.dtype.element_ty
    column = tl.arange(0, A)
    tl.store(grad_sem_ptr + at * A + column[None, :], grad_sem.to(dtype), mask=inside)
    column = tl.arange(0, G)
    tl.store(grad_geo_ptr + at * G + column[None, :], grad_geo.to(dtype), mask=inside)
    column = tl.arange(0, D)
    tl.store(grad_v_ptr + at * D + column[None, :], grad_v.to(dtype), mask=inside)
