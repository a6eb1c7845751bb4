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
SLOTS = 64
"""Places for the magnitude of a whole tensor, so that programs do not wait for each other at one."""
LEAST_AMAX = 1e-12


@triton.jit
def _tile(block, n_blocks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows and columns of a tile."""
    row = (block // n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    return row, (block % n_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _load(x_ptr, row, col, m, n, width, EVEN: tl.constexpr):
    """A tile of the first n columns of rows that are `width` apart."""
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
def _find(x, amax_ptr, row, col, m, n, first, block, PER_TENSOR: tl.constexpr, SLOTS: tl.constexpr):
    """Add the magnitudes of a tile to those of rows, at amax_ptr, and of columns that begin at `first`, after all m rows."""
    size = tl.abs(x)
    size = tl.where(size == size, size, 0.0).to(tl.int32, bitcast=True)
    by_row = tl.max(size, axis=1)
    if PER_TENSOR:
        tl.atomic_max(amax_ptr + block % SLOTS, tl.max(by_row, axis=0), sem="relaxed")
    else:
        tl.atomic_max(amax_ptr + row, by_row, mask=row < m, sem="relaxed")
        tl.atomic_max(amax_ptr + m + first + col, tl.max(size, axis=0), mask=col < n, sem="relaxed")


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
    block = tl.program_id(0)
    row, col = _tile(block, n_blocks, BLOCK_M, BLOCK_N)
    if KIND == 0:
        x = _load(x_ptr, row, col, m, n, n, EVEN)
        _find(x, amax_ptr, row, col, m, n, 0, block, PER_TENSOR, SLOTS)
    elif KIND == 1:
        gate, up, share = _gate_up(x_ptr, row, col, m, n, EVEN)
        _find(gate * share * up, amax_ptr, row, col, m, n, 0, block, PER_TENSOR, SLOTS)
    else:
        grad_gate, grad_up = _gradients(
            x_ptr, grad_ptr, grad_scale_ptr, other_scale_ptr, row, col, m, n, PER_TENSOR, EVEN
        )
        _find(grad_gate, amax_ptr, row, col, m, n, 0, block, PER_TENSOR, SLOTS)
        _find(grad_up, amax_ptr, row, col, m, n, n, block, PER_TENSOR, SLOTS)


@triton.jit
def _scale(bits, MOST: tl.constexpr, LEAST: tl.constexpr, IS_POWER: tl.constexpr):
    """What takes a magnitude, given as an integer, to at most MOST."""
    scale = tl.div_rn(MOST, tl.maximum(bits.to(tl.float32, bitcast=True), LEAST))
    if IS_POWER:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _cast(
    x,
    amax_ptr,
    rows_ptr,
    row_scale_ptr,
    columns_ptr,
    column_scale_ptr,
    row,
    col,
    m,
    n,
    first,
    width,
    block,
    n_blocks,
    PER_TENSOR: tl.constexpr,
    SLOTS: tl.constexpr,
    EVEN: tl.constexpr,
    MOST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Write a tile by rows and by columns, into columns that begin at `first` of rows that are `width` apart."""
    dtype = rows_ptr.dtype.element_ty
    rows_at = rows_ptr + row.to(tl.int64)[:, None] * width + (first + col)[None, :]
    columns_at = columns_ptr + (first + col).to(tl.int64)[None, :] * m + row[:, None]
    if PER_TENSOR:
        scale = _scale(tl.max(tl.load(amax_ptr + tl.arange(0, SLOTS)), axis=0), MOST, LEAST, False)
        if block == 0:
            tl.store(row_scale_ptr, tl.div_rn(1.0, scale))
            tl.store(column_scale_ptr, tl.div_rn(1.0, scale))
        by_row = (x * scale).to(dtype)
        by_column = by_row
    else:
        row_scale = _scale(tl.load(amax_ptr + row, mask=row < m, other=0), MOST, LEAST, True)
        column_scale = _scale(tl.load(amax_ptr + m + first + col, mask=col < n, other=0), MOST, LEAST, True)
        if block % n_blocks == 0:
            tl.store(row_scale_ptr + row, tl.div_rn(1.0, row_scale), mask=row < m)
        if block < n_blocks:
            tl.store(column_scale_ptr + first + col, tl.div_rn(1.0, column_scale), mask=col < n)
        by_row = (x * row_scale[:, None]).to(dtype)
        by_column = (x * column_scale[None, :]).to(dtype)
    if EVEN:
        tl.store(rows_at, by_row)
        tl.store(columns_at, by_column)
    else:
        mask = (row < m)[:, None] & (col < n)[None, :]
        tl.store(rows_at, by_row, mask=mask)
        tl.store(columns_at, by_column, mask=mask)


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
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    row, col = _tile(block, n_blocks, BLOCK_M, BLOCK_N)
    if KIND == 0:
        x = _load(x_ptr, row, col, m, n, n, EVEN)
        _cast(
            x,
            amax_ptr,
            rows_ptr,
            row_scale_ptr,
            columns_ptr,
            column_scale_ptr,
            row,
            col,
            m,
            n,
            0,
            n,
            block,
            n_blocks,
            PER_TENSOR,
            SLOTS,
            EVEN,
            MOST,
            LEAST,
        )
    elif KIND == 1:
        gate, up, share = _gate_up(x_ptr, row, col, m, n, EVEN)
        _cast(
            gate * share * up,
            amax_ptr,
            rows_ptr,
            row_scale_ptr,
            columns_ptr,
            column_scale_ptr,
            row,
            col,
            m,
            n,
            0,
            n,
            block,
            n_blocks,
            PER_TENSOR,
            SLOTS,
            EVEN,
            MOST,
            LEAST,
        )
    else:
        grad_gate, grad_up = _gradients(
            x_ptr, grad_ptr, grad_scale_ptr, other_scale_ptr, row, col, m, n, PER_TENSOR, EVEN
        )
        _cast(
            grad_gate,
            amax_ptr,
            rows_ptr,
            row_scale_ptr,
            columns_ptr,
            column_scale_ptr,
            row,
            col,
            m,
            n,
            0,
            2 * n,
            block,
            n_blocks,
            PER_TENSOR,
            SLOTS,
            EVEN,
            MOST,
            LEAST,
        )
        _cast(
            grad_up,
            amax_ptr,
            rows_ptr,
            row_scale_ptr,
            columns_ptr,
            column_scale_ptr,
            row,
            col,
            m,
            n,
            n,
            2 * n,
            block,
            n_blocks,
            PER_TENSOR,
            SLOTS,
            EVEN,
            MOST,
            LEAST,
        )


_finds, _casts = Launches(_find_kernel), Launches(_cast_kernel)
Cast = tuple[Tensor, Tensor, Tensor, Tensor]


def float8_cast(x: Tensor, per_tensor: bool, e5m2: bool) -> Cast:
    return _run(PLAIN, x.contiguous(), *x.shape, per_tensor, e5m2)


def float8_swiglu(packed: Tensor, per_tensor: bool) -> Cast:
    return _run(SWIGLU, packed.contiguous(), packed.shape[0], packed.shape[1] // 2, per_tensor, False)


def float8_swiglu_backward(
    grad: Tensor, grad_scale: Tensor, column_scale: Tensor, packed: Tensor, per_tensor: bool, e5m2: bool
) -> Cast:
    given = grad.contiguous(), grad_scale.contiguous(), column_scale.contiguous()
    return _run(GRADIENT, packed.contiguous(), *grad.shape, per_tensor, e5m2, *given)


def _run(kind: int, x: Tensor, m: int, n: int, per_tensor: bool, e5m2: bool, *given: Tensor) -> Cast:
    """Both passes over a matrix [m, n], or two side by side in the kind of a gradient."""
    width = 2 * n if kind == GRADIENT else n
    dtype = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    rows, columns = (torch.empty(shape, dtype=dtype, device=x.device) for shape in ((m, width), (width, m)))
    row_scale, column_scale = (
        torch.empty((1 if per_tensor else size, 1), dtype=torch.float32, device=x.device)
        for size in (m, width)
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
