"""A matrix and its transpose in float8 in two passes: one finds the largest magnitudes of rows and columns, the other
scales, casts and transposes. Each reads the matrix once; 6 bytes move for an element of 16 bits.

The second pass begins where the first one ended, with what the L2 still holds. Magnitudes are compared as integers, in
which order non-negative floats are the same; a NaN is no magnitude. Casts saturate, and keep NaN.
"""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

FIND, CAST = (128, 128), (128, 64)
"""Tiles of the two passes. Transposed, a run of memory is a tile's rows long: 128 bytes."""
WARPS = 8
SLOTS = 64
"""Places for the magnitude of a whole tensor, so that programs do not wait for each other at one."""
LEAST_AMAX = 1e-12


@triton.jit
def _tile(block, n_blocks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a tile."""
    row = (block // n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, (block % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _load(x_ptr, row, col, m, n, EVEN: tl.constexpr):
    at = x_ptr + row.to(tl.int64)[:, None] * n + col[None, :]
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(row < m)[:, None] & (col < n)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _find_kernel(
    x_ptr,
    amax_ptr,
    m,
    n,
    n_blocks,
    PER_TENSOR: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
):
    block = tl.program_id(0)
    row, col = _tile(block, n_blocks, BLOCK_M, BLOCK_N)
    size = tl.abs(_load(x_ptr, row, col, m, n, EVEN))
    size = tl.where(size == size, size, 0.0).to(tl.int32, bitcast=True)
    by_row = tl.max(size, axis=1)
    if PER_TENSOR:
        tl.atomic_max(amax_ptr + block % SLOTS, tl.max(by_row, axis=0), sem="relaxed")
    else:
        by_column = tl.max(size, axis=0)
        tl.atomic_max(amax_ptr + row, by_row, mask=row < m, sem="relaxed")
        tl.atomic_max(amax_ptr + m + col, by_column, mask=col < n, sem="relaxed")


@triton.jit
def _scale(bits, MOST: tl.constexpr, LEAST: tl.constexpr, IS_POWER: tl.constexpr):
    """What takes a magnitude, given as an integer, to at most MOST."""
    scale = tl.div_rn(MOST, tl.maximum(bits.to(tl.float32, bitcast=True), LEAST))
    if IS_POWER:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _cast_kernel(
    x_ptr,
    amax_ptr,
    rows_ptr,
    row_scale_ptr,
    columns_ptr,
    column_scale_ptr,
    m,
    n,
    n_blocks,
    PER_TENSOR: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = _tile(block, n_blocks, BLOCK_M, BLOCK_N)
    x = _load(x_ptr, row, col, m, n, EVEN)
    dtype = rows_ptr.dtype.element_ty
    rows_at = rows_ptr + row.to(tl.int64)[:, None] * n + col[None, :]
    columns_at = columns_ptr + col.to(tl.int64)[None, :] * m + row[:, None]
    if PER_TENSOR:
        scale = _scale(tl.max(tl.load(amax_ptr + tl.arange(0, SLOTS)), axis=0), MOST, LEAST, False)
        if block == 0:
            tl.store(row_scale_ptr, tl.div_rn(1.0, scale))
            tl.store(column_scale_ptr, tl.div_rn(1.0, scale))
        by_row = (x * scale).to(dtype)
        by_column = by_row
    else:
        row_scale = _scale(tl.load(amax_ptr + row, mask=row < m, other=0), MOST, LEAST, True)
        column_scale = _scale(tl.load(amax_ptr + m + col, mask=col < n, other=0), MOST, LEAST, True)
        if block % n_blocks == 0:
            tl.store(row_scale_ptr + row, tl.div_rn(1.0, row_scale), mask=row < m)
        if block < n_blocks:
            tl.store(column_scale_ptr + col, tl.div_rn(1.0, column_scale), mask=col < n)
        by_row = (x * row_scale[:, None]).to(dtype)
        by_column = (x * column_scale[None, :]).to(dtype)
    if EVEN:
        tl.store(rows_at, by_row)
        tl.store(columns_at, by_column)
    else:
        mask = (row < m)[:, None] & (col < n)[None, :]
        tl.store(rows_at, by_row, mask=mask)
        tl.store(columns_at, by_column, mask=mask)


_finds, _casts = Launches(_find_kernel), Launches(_cast_kernel)


def float8_cast(x: Tensor, per_tensor: bool, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    m, n = x.shape
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    rows, columns = (torch.empty(shape, dtype=dtype, device=x.device) for shape in ((m, n), (n, m)))
    row_scale, column_scale = (
        torch.empty((1 if per_tensor else size, 1), dtype=torch.float32, device=x.device) for size in (m, n)
    )
    amax = torch.zeros(SLOTS if per_tensor else m + n, dtype=torch.int32, device=x.device)
    key = (m, n, x.dtype, per_tensor, e5m2, x.get_device())
    find, cast = _finds.get(key), _casts.get(key)
    if find is None or cast is None:
        find = _finds.add(
            key, *_grid(m, n, *FIND), per_tensor, SLOTS, *FIND, _is_even(m, n, FIND), num_warps=WARPS
        )
        constants = (per_tensor, SLOTS, *CAST, _is_even(m, n, CAST), torch.finfo(dtype).max, LEAST_AMAX)
        cast = _casts.add(key, *_grid(m, n, *CAST), *constants, num_warps=WARPS)
    find(x, amax)
    cast(x, amax, rows, row_scale, columns, column_scale)
    return rows, row_scale, columns, column_scale


def _grid(m: int, n: int, block_m: int, block_n: int) -> tuple[tuple[int], tuple[int, int, int]]:
    n_blocks = -(-n // block_n)
    return (-(-m // block_m) * n_blocks,), (m, n, n_blocks)


def _is_even(m: int, n: int, tile: tuple[int, int]) -> bool:
    return m % tile[0] == 0 and n % tile[1] == 0
