"""Tiles of rows, as programs that take one after the other load, keep and store them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_known(ptr, mask, EXACT: tl.constexpr):
    """Load, zeros outside the mask, which holds everywhere where tiles are EXACT."""
    return tl.load(ptr) if EXACT else tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def places(start, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr):
    """Return the offsets of the tile that begins at row `start`. A constant width needs no multiplication."""
    WIDTH = BLOCK_N if EXACT else width
    local = tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, BLOCK_N)[None, :]
    return tl.full([], start, tl.int64) * WIDTH + local


@triton.jit
def as_held(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile as a program keeps it from turn to turn: two numbers of bf16 to a word."""
    if tile.dtype == tl.bfloat16:
        even, odd = tl.split(tl.reshape(tile.to(tl.uint16, bitcast=True), [BLOCK_M, BLOCK_N // 2, 2]))
        held = even.to(tl.uint32) | (odd.to(tl.uint32) << 16)
    else:
        held = tile
    return held


@triton.jit
def load_rows(ptr, start, n_rows, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr):
    """Load the tile that begins at row `start`, zeros outside; with whole tiles, the last one beyond the end."""
    if EXACT:
        tile = tl.load(ptr + places(tl.minimum(start, n_rows - BLOCK_M), width, BLOCK_M, BLOCK_N, EXACT))
    else:
        mask = (start + tl.arange(0, BLOCK_M) < n_rows)[:, None] & (tl.arange(0, BLOCK_N) < width)[None, :]
        tile = tl.load(ptr + places(start, width, BLOCK_M, BLOCK_N, EXACT), mask=mask, other=0.0)
    return as_held(tile, BLOCK_M, BLOCK_N)


@triton.jit
def load_of_rows(ptr, start, n_rows, BLOCK_M: tl.constexpr):
    """Load a number of each row of the tile that begins at row `start`, of the last row beyond it."""
    row = tl.minimum(start + tl.arange(0, BLOCK_M), n_rows - 1)
    return tl.load(ptr + row.to(tl.int64))


@triton.jit
def as_numbers(held, ACC: tl.constexpr):
    """Unpack the numbers of a tile from registers."""
    if held.dtype == tl.uint32:
        even, odd = (
            (held << 16).to(tl.float32, bitcast=True),
            (held & 0xFFFF0000).to(tl.float32, bitcast=True),
        )
        tile = tl.interleave(even, odd)
    else:
        tile = held.to(ACC)
    return tile


@triton.jit
def rounded(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Round float32 to packed bf16, two numbers by one instruction."""
    even, odd = tl.split(tl.reshape(tile, [BLOCK_M, BLOCK_N // 2, 2]))
    return tl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [even, odd], tl.uint32, True, 1)  # fmt: skip


@triton.jit
def two_sums(a, b):
    """Sum a and b over their columns, in one exchange among warps."""
    return tl.split(tl.sum(tl.join(a, b), axis=1))


@triton.jit
def store_known(ptr, value, mask, EXACT: tl.constexpr):
    """Store inside the mask, which holds everywhere where tiles are EXACT."""
    if EXACT:
        tl.store(ptr, value)
    else:
        tl.store(ptr, value, mask=mask)
