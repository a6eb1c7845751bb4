"""Kernel and launcher of `caramba::absorbed_step`: the queries of a decode step, and what it adds to the cache.

Both are made of one product's output, so that one launch makes both: what is cached counts as one head more, whose
programs copy parts of the latent and turn pairs of the geometric key while those of the other heads multiply.
"""

from __future__ import annotations

from caramba.kernels.triton.absorbed_queries import QUERY_COLUMNS, loaded, power_of_2, query_part, rows_of
from caramba.kernels.triton.launch import Launches
from caramba.kernels.triton.pdl import pdl_options, supports_pdl
from caramba.kernels.triton.signature import tensor_signature
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _append_part(
    c_ptr,
    k_geo_ptr,
    cos_ptr,
    sin_ptr,
    into_c,
    into_geo,
    lengths,
    c_batch,
    c_token,
    geo_batch,
    geo_token,
    into_c_batch,
    into_c_place,
    into_geo_batch,
    into_geo_place,
    table_batch,
    n_rows,
    n_tokens,
    capacity,
    part,
    R: tl.constexpr,
    P: tl.constexpr,
    COLUMN: tl.constexpr,
    SEM_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write part of the cache entry of a block of rows: the latent first, then rotated pairs, from COLUMN on."""
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < n_rows
    batch, token = (row // n_tokens).to(tl.int64), (row % n_tokens).to(tl.int64)
    place = tl.load(lengths + batch, inside, other=-1).to(tl.int64) + token
    is_kept = inside & (place >= 0) & (place < capacity)
    if part < SEM_BLOCKS:
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)
        value = loaded(c_ptr, batch * c_batch + token * c_token, inside, column, R)
        at = into_c + batch * into_c_batch + place * into_c_place
        mask = is_kept[:, None] & (column < R)[None, :]
        tl.store(at[:, None] + column[None, :], value.to(into_c.dtype.element_ty), mask=mask)
    else:
        pair = (part - SEM_BLOCKS) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        geo_at = batch * geo_batch + token * geo_token
        first = loaded(k_geo_ptr, geo_at, inside, pair, P).to(tl.float32)
        second = loaded(k_geo_ptr + P, geo_at, inside, pair, P).to(tl.float32)
        table = batch * table_batch + token * P
        cos = loaded(cos_ptr, table, inside, pair, P)
        sin = loaded(sin_ptr, table, inside, pair, P)
        # Rounded to the stream's own type first, as where the rotation is an op of its own.
        low = (first * cos - second * sin).to(k_geo_ptr.dtype.element_ty)
        high = (second * cos + first * sin).to(k_geo_ptr.dtype.element_ty)
        turned_at = into_geo + batch * into_geo_batch + place * into_geo_place + COLUMN
        is_pair = is_kept[:, None] & (pair < P)[None, :]
        tl.store(turned_at[:, None] + pair[None, :], low.to(into_geo.dtype.element_ty), mask=is_pair)
        tl.store(turned_at[:, None] + P + pair[None, :], high.to(into_geo.dtype.element_ty), mask=is_pair)


# Where a row ends is only compared with: one kernel serves caches of every length.
@triton.jit(do_not_specialize=["capacity"])
def _step_kernel(
    q_ptr,
    sem_ptr,
    geo_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    c_ptr,
    k_geo_ptr,
    into_c,
    into_geo,
    lengths,
    q_batch,
    q_token,
    q_head,
    c_batch,
    c_token,
    geo_batch,
    geo_token,
    into_c_batch,
    into_c_place,
    into_geo_batch,
    into_geo_place,
    table_batch,
    n_rows,
    n_tokens,
    n_heads,
    scale,
    capacity,
    D: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    COLUMN: tl.constexpr,
    SEM_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
    head, part = tl.program_id(0) % (n_heads + 1), tl.program_id(0) // (n_heads + 1)
    if head == n_heads:
        _append_part(
            c_ptr, k_geo_ptr, cos_ptr, sin_ptr, into_c, into_geo, lengths, c_batch, c_token, geo_batch, geo_token,
            into_c_batch, into_c_place, into_geo_batch, into_geo_place, table_batch, n_rows, n_tokens, capacity,
            part, R, P, COLUMN, SEM_BLOCKS, BLOCK_T, BLOCK_N,
        )  # fmt: skip
    else:
        query_part(
            q_ptr, sem_ptr, geo_ptr, cos_ptr, sin_ptr, y_ptr, q_batch, q_token, q_head, table_batch, n_rows,
            n_tokens, n_heads, scale, head, part, D, R, P, SEM_BLOCKS, BLOCK_T, BLOCK_D, BLOCK_N,
        )  # fmt: skip


_steps = Launches(_step_kernel)


def absorbed_step(
    q: Tensor,
    sem_map: Tensor,
    geo_map: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: float,
    c: Tensor,
    k_geo: Tensor,
    buffers: list[Tensor],
    lengths: Tensor,
) -> Tensor:
    """Run the op; everything but the places is decided by shapes, so nothing waits for the device."""
    batch, n_tokens, heads, width = q.shape
    latent, pairs = sem_map.shape[-1], geo_map.shape[-1] // 2
    y = q.new_empty((batch, n_tokens, heads, latent + 2 * pairs))
    if y.numel() == 0:
        return y
    q, c, k_geo = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, c, k_geo))
    sem_map, geo_map = sem_map.contiguous(), geo_map.contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    into_c, into_geo = buffers[0], buffers[-1]
    key = (
        *(tensor_signature(q), sem_map.dtype, geo_map.dtype, latent, pairs, cos.shape, scale),
        *(
            tensor_signature(c),
            tensor_signature(k_geo),
            tensor_signature(into_c),
            tensor_signature(into_geo),
            len(buffers),
        ),
    )
    launch = _steps.get(key)
    if launch is None:
        rows, block_t = batch * n_tokens, rows_of(batch * n_tokens)
        sem_blocks = -(-latent // QUERY_COLUMNS)
        blocks = sem_blocks + -(-pairs // (QUERY_COLUMNS // 2))
        table_batch = n_tokens * pairs if cos.dim() == 4 and cos.shape[0] > 1 else 0
        strides = [
            *(*q.stride()[:3], c.stride(0), c.stride(2), k_geo.stride(0), k_geo.stride(2)),
            *(into_c.stride(0), into_c.stride(2), into_geo.stride(0), into_geo.stride(2)),
        ]
        capacity = min(into_c.shape[2], into_geo.shape[2])
        early = supports_pdl(q.device)
        launch = _steps.add(
            key,
            ((heads + 1) * blocks, -(-rows // block_t)),
            (*strides, table_batch, rows, n_tokens, heads, scale, capacity),
            *(width, latent, pairs, latent if len(buffers) == 1 else 0),
            *(sem_blocks, block_t, power_of_2(width), QUERY_COLUMNS, early),
            num_warps=4,
            **pdl_options(early),
        )
    launch(q, sem_map, geo_map, cos, sin, y, c, k_geo, into_c, into_geo, lengths)
    return y
