"""Kernels and launchers of the products of each head in a decode step: a program makes some columns of one head.

Rows are few and maps small, so that a program holds its part of the map, and its time is that of one wait for memory:
columns are cut until there are about as many programs as multiprocessors. Queries are read in place from the projection that
contains them, and results go where the next kernel reads them, so that nothing is copied between.
"""

from __future__ import annotations

from caramba.kernels.triton.launch import Launches
from caramba.kernels.triton.signature import tensor_signature
from torch import Tensor

import triton
import triton.language as tl

QUERY_COLUMNS = 64
"""Columns of a program: of a layer of 32 heads these make 96 programs."""
MOST_ROWS = 64


@triton.jit
def loaded(ptr, row_at, row_mask, column, WIDTH: tl.constexpr):
    """Load a tile of rows at offsets, zeros where there is none."""
    mask = row_mask[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + row_at[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def query_part(
    q_ptr,
    sem_ptr,
    geo_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    q_batch,
    q_token,
    q_head,
    table_batch,
    n_rows,
    n_tokens,
    n_heads,
    scale,
    head,
    part,
    D: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    SEM_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Compute part of a head's queries for a block of rows: of the latent first, then rotated pairs."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < n_rows
    batch, token = row // n_tokens, row % n_tokens
    feature = tl.arange(0, BLOCK_D)
    in_width = feature < D
    q_at = batch.to(tl.int64) * q_batch + token.to(tl.int64) * q_token + head.to(tl.int64) * q_head
    q = loaded(q_ptr, q_at, inside, feature, D)
    y_at = (row.to(tl.int64) * n_heads + head) * (R + 2 * P)
    if part < SEM_BLOCKS:
        column = part * BLOCK_N + tl.arange(0, BLOCK_N)
        sem = loaded(sem_ptr + head * (D * R), feature * R, in_width, column, R).to(DTYPE)
        mapped = tl.dot((q.to(tl.float32) * scale).to(DTYPE), sem)
        mask = inside[:, None] & (column < R)[None, :]
        tl.store(y_ptr + y_at[:, None] + column[None, :], mapped.to(DTYPE), mask=mask)
    else:
        pair = (part - SEM_BLOCKS) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        geo_at = geo_ptr + head * (D * 2 * P)
        first_map = loaded(geo_at, feature * (2 * P), in_width, pair, P).to(DTYPE)
        second_map = loaded(geo_at + P, feature * (2 * P), in_width, pair, P).to(DTYPE)
        table = batch * table_batch + token * P
        cos = loaded(cos_ptr, table, inside, pair, P)
        sin = loaded(sin_ptr, table, inside, pair, P)
        first, second = tl.dot(q, first_map), tl.dot(q, second_map)
        is_pair = inside[:, None] & (pair < P)[None, :]
        into = y_ptr + y_at[:, None] + R + pair[None, :]
        tl.store(into, ((first * cos - second * sin) * scale).to(DTYPE), mask=is_pair)
        tl.store(into + P, ((second * cos + first * sin) * scale).to(DTYPE), mask=is_pair)


@triton.jit
def _queries_kernel(
    q_ptr,
    sem_ptr,
    geo_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    q_batch,
    q_token,
    q_head,
    table_batch,
    n_rows,
    n_tokens,
    n_heads,
    scale,
    D: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    SEM_BLOCKS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    query_part(
        q_ptr, sem_ptr, geo_ptr, cos_ptr, sin_ptr, y_ptr, q_batch, q_token, q_head, table_batch, n_rows, n_tokens,
        n_heads, scale, head, part, D, R, P, SEM_BLOCKS, BLOCK_T, BLOCK_D, BLOCK_N,
    )  # fmt: skip


_queries = Launches(_queries_kernel)


def absorbed_queries(q: Tensor, sem_map: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    batch, n_tokens, heads, width = q.shape
    latent, pairs = sem_map.shape[-1], geo_map.shape[-1] // 2
    y = q.new_empty((batch, n_tokens, heads, latent + 2 * pairs))
    if y.numel() == 0:
        return y
    q = q if q.stride(-1) == 1 else q.contiguous()
    sem_map, geo_map = sem_map.contiguous(), geo_map.contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    key = (tensor_signature(q), sem_map.dtype, geo_map.dtype, latent, pairs, cos.shape, scale)
    launch = _queries.get(key)
    if launch is None:
        rows, block_t = batch * n_tokens, rows_of(batch * n_tokens)
        sem_blocks = -(-latent // QUERY_COLUMNS)
        blocks = sem_blocks + -(-pairs // (QUERY_COLUMNS // 2))
        table_batch = n_tokens * pairs if cos.dim() == 4 and cos.shape[0] > 1 else 0
        launch = _queries.add(
            key,
            (heads * blocks, -(-rows // block_t)),
            (*q.stride()[:3], table_batch, rows, n_tokens, heads, scale),
            *(width, latent, pairs, sem_blocks, block_t, power_of_2(width), QUERY_COLUMNS),
            num_warps=4,
        )
    launch(q, sem_map, geo_map, cos, sin, y)
    return y


def rows_of(rows: int) -> int:
    return min(power_of_2(rows), MOST_ROWS)


def power_of_2(n: int) -> int:
    """Return the next power of two that a product takes."""
    return max(16, 1 << (n - 1).bit_length())
