"""A matrix and its transpose in float8 in two passes: one finds the largest magnitudes of rows and columns, the other
scales, casts and transposes. Each reads the matrix once; 6 bytes move for an element of 16 bits. Of SwiGLU and its
gradient the matrix is made from what it is of, in both passes, and is never in memory.

The second pass begins where the first one ended, with what the L2 still holds. Magnitudes are compared as integers, in
which order non-negative floats are the same; a NaN is no magnitude. Casts saturate, and keep NaN.
"""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

PLAIN, SWIGLU, GRADIENT = 0, 1, 2
"""What the matrix is made of: itself, gate and up side by side, or these and a gradient of what they make."""
FIND = {PLAIN: (128, 128), SWIGLU: (128, 64), GRADIENT: (64, 64)}
CAST = {PLAIN: (128, 64), SWIGLU: (128, 64), GRADIENT: (64, 64)}
"""Tiles of the two passes. Transposed, a run of memory is a tile's rows long."""
WARPS = 8
SLOTS = 32
"""Places for the magnitude of a whole tensor, so that programs do not wait for each other at one: a warp reads them."""
LEAST_AMAX = 1e-12


@triton.jit
def _tile(block, n_blocks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a tile."""
    row = (block // n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, (block % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _load(x_ptr, row, col, m, n, width, EVEN: tl.constexpr):
    """Load a tile of the first n columns of rows with stride `width`."""
    at = x_ptr + row.to(tl.int64)[:, None] * width + col[None, :]
    if EVEN:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=(row < m)[:, None] & (col < n)[None, :], other=0.0)
    return x.to(tl.float32)


@triton.jit
def _gate_up(packed_ptr, row, col, m, n, EVEN: tl.constexpr):
    """Tiles of gate, up and sigmoid(gate)."""
    gate = _load(packed_ptr, row, col, m, n, 2 * n, EVEN)
    up = _load(packed_ptr + n, row, col, m, n, 2 * n, EVEN)
    return gate, up, 1.0 / (1.0 + tl.exp(-gate))


@triton.jit
def _gradients(
    packed_ptr,
    grad_ptr,
    grad_scale_ptr,
    other_scale_ptr,
    row,
    col,
    m,
    n,
    PER_TENSOR: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Tiles of the gradients of gate and up."""
    gate, up, share = _gate_up(packed_ptr, row, col, m, n, EVEN)
    grad = _load(grad_ptr, row, col, m, n, n, EVEN)
    if not PER_TENSOR:
        grad_scale = tl.load(grad_scale_ptr + row, mask=row < m, other=1.0)
        other_scale = tl.load(other_scale_ptr + col, mask=col < n, other=1.0)
        grad = grad * grad_scale[:, None] * other_scale[None, :]
    return grad * up * share * (1.0 + gate * (1.0 - share)), grad * gate * share


@triton.jit
def _made(
    x_ptr,
    grad_ptr,
    grad_scale_ptr,
    other_scale_ptr,
    row,
    col,
    m,
    n,
    KIND: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    EVEN: tl.constexpr,
):
    """A tile of the matrix and the one n columns on, which only gradients have: else it is the same."""
    # One return: what follows one in a branch is compiled too, with pointers that are None in other kinds.
    if KIND == 0:
        left = _load(x_ptr, row, col, m, n, n, EVEN)
        right = left
    elif KIND == 1:
        gate, up, share = _gate_up(x_ptr, row, col, m, n, EVEN)
        left = gate * share * up
        right = left
    else:
        left, right = _gradients(x_ptr, grad_ptr, grad_scale_ptr, other_scale_ptr, row, col, m, n, PER_TENSOR, EVEN)
    return left, right


@triton.jit
def _find_kernel(
    x_ptr,
    amax_ptr,
    grad_ptr,
    grad_scale_ptr,
    other_scale_ptr,
    m,
    n,
    n_blocks,
    KIND: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Add the magnitudes of a tile to those of rows, at amax_ptr, and to those of columns, which follow all m rows'."""
    block = tl.program_id(0)
    row, col = _tile(block, n_blocks, BLOCK_M, BLOCK_N)
    left, right = _made(x_ptr, grad_ptr, grad_scale_ptr, other_scale_ptr, row, col, m, n, KIND, PER_TENSOR, EVEN)
    for part in tl.static_range(2 if KIND == 2 else 1):
        size = tl.abs(left if part == 0 else right)
        size = tl.where(size == size, size, 0.0).to(tl.int32, bitcast=True)
        by_row = tl.max(size, axis=1)
        if PER_TENSOR:
            tl.atomic_max(amax_ptr + block % SLOTS, tl.max(by_row, axis=0), sem="relaxed")
        else:
            tl.atomic_max(amax_ptr + row, by_row, mask=row < m, sem="relaxed")
            tl.atomic_max(amax_ptr + m + part * n + col, tl.max(size, axis=0), mask=col < n, sem="relaxed")


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
    grad_ptr,
    grad_scale_ptr,
    other_scale_ptr,
    m,
    n,
    n_blocks,
    KIND: tl.constexpr,
    PER_TENSOR: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Write a tile by rows and by columns, and at the matrix's edges what undoes the scales."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = _tile(block, n_blocks, BLOCK_M, BLOCK_N)
    left, right = _made(x_ptr, grad_ptr, grad_scale_ptr, other_scale_ptr, row, col, m, n, KIND, PER_TENSOR, EVEN)
    parts: tl.constexpr = 2 if KIND == 2 else 1
    dtype = rows_ptr.dtype.element_ty
    if PER_TENSOR:
        # Rows and columns are cast each for themselves, with scales that no compiler knows to be one. Of numbers that are
        # cast once and stored in both orders ptxas 12.8 loses some: it makes two casts one instruction, for the rows, and
        # the columns get the first one's register (github.com/triton-lang/triton/issues/11111).
        slots = amax_ptr + tl.arange(0, SLOTS)
        row_scale = _scale(tl.max(tl.load(slots), axis=0), MOST, LEAST, False)
        column_scale = _scale(tl.max(tl.load(slots, volatile=True), axis=0), MOST, LEAST, False)
        if block == 0:
            tl.store(row_scale_ptr, tl.div_rn(1.0, row_scale))
            tl.store(column_scale_ptr, tl.div_rn(1.0, column_scale))
    else:
        row_scale = _scale(tl.load(amax_ptr + row, mask=row < m, other=0), MOST, LEAST, True)
        if block % n_blocks == 0:
            tl.store(row_scale_ptr + row, tl.div_rn(1.0, row_scale), mask=row < m)
        row_scale = row_scale[:, None]
    for part in tl.static_range(parts):
        x = left if part == 0 else right
        column = part * n + col
        if not PER_TENSOR:
            column_scale = _scale(tl.load(amax_ptr + m + column, mask=col < n, other=0), MOST, LEAST, True)
            if block < n_blocks:
                tl.store(column_scale_ptr + column, tl.div_rn(1.0, column_scale), mask=col < n)
            column_scale = column_scale[None, :]
        by_row, by_column = (x * row_scale).to(dtype), (x * column_scale).to(dtype)
        rows_at = rows_ptr + row.to(tl.int64)[:, None] * (parts * n) + column[None, :]
        columns_at = columns_ptr + column.to(tl.int64)[None, :] * m + row[:, None]
        if EVEN:
            tl.store(rows_at, by_row)
            tl.store(columns_at, by_column)
        else:
            mask = (row < m)[:, None] & (col < n)[None, :]
            tl.store(rows_at, by_row, mask=mask)
            tl.store(columns_at, by_column, mask=mask)


_finds, _casts = Launches(_find_kernel), Launches(_cast_kernel)
Cast = tuple[Tensor, Tensor, Tensor, Tensor]


def float8_cast(x: Tensor, per_tensor: bool, e5m2: bool) -> Cast:
    return run_cast(PLAIN, x.contiguous(), *x.shape, per_tensor, e5m2)


def run_cast(kind: int, x: Tensor, m: int, n: int, per_tensor: bool, e5m2: bool, *given: Tensor) -> Cast:
    """Both passes over a matrix [m, n], or two side by side in the kind of a gradient."""
    width = 2 * n if kind == GRADIENT else n
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    rows, columns = (torch.empty(shape, dtype=dtype, device=x.device) for shape in ((m, width), (width, m)))
    row_scale, column_scale = (
        torch.empty((1 if per_tensor else size, 1), dtype=torch.float32, device=x.device) for size in (m, width)
    )
    amax = torch.zeros(SLOTS if per_tensor else m + width, dtype=torch.int32, device=x.device)
    beside = given or (None, None, None)
    key = (kind, m, n, x.dtype, given[0].dtype if given else None, per_tensor, e5m2, x.get_device())
    find, cast = _finds.get(key), _casts.get(key)
    if find is None or cast is None:
        constants = (kind, per_tensor, SLOTS)
        find = _finds.add(
            key,
            *_grid(m, n, FIND[kind]),
            *constants,
            *FIND[kind],
            _is_even(m, n, FIND[kind]),
            num_warps=WARPS,
        )
        constants = (*constants, *CAST[kind], _is_even(m, n, CAST[kind]), torch.finfo(dtype).max, LEAST_AMAX)
        options = {"maxnreg": 128} if kind == GRADIENT else {}  # 12 too many for two programs at a time
        cast = _casts.add(key, *_grid(m, n, CAST[kind]), *constants, num_warps=WARPS, **options)
    find(x, amax, *beside)
    cast(x, amax, rows, row_scale, columns, column_scale, *beside)
    return rows, row_scale, columns, column_scale


def _grid(m: int, n: int, tile: tuple[int, int]) -> tuple[tuple[int], tuple[int, int, int]]:
    n_blocks = -(-n // tile[1])
    return (-(-m // tile[0]) * n_blocks,), (m, n, n_blocks)


def _is_even(m: int, n: int, tile: tuple[int, int]) -> bool:
    return m % tile[0] == 0 and n % tile[1] == 0
