"""Kernel and launcher of `caramba::small_batch_linear` for 2 to 64 rows: tensor cores take tiles of the weight as they arrive.

A program computes all rows of some columns of the result. Tiles of the weight come through shared memory, several in
flight, and are read once; those of x come from the cache. Where programs make few columns each warp takes a
part of every tile's width and the parts are added at the end; where there are too few programs they also share the
width, and the last one to arrive adds what the others left. Sums have one fixed order. Rows are normalised by a launch
before: inside, by every program, it took as long with 8 rows and longer with more. Codes are dequantised to 16 bits
before the products: those of 8 bits as they are, and a row's sum is scaled; those of 4 bits, words of four, with the
scale and the zero of their group.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from caramba.kernels.cuda.int4_gemv import GROUP
from caramba.kernels.triton.launch import Launches
from caramba.kernels.triton.rms_norm import rms_norm
from torch import Tensor

import triton
import triton.language as tl

PROCESSORS = 132
"""Multiprocessors of an H200."""
MOST_TILES = 16384
"""Tiles of one call whose programs may share the width: a counter each."""
SHARED_BYTES, LEEWAY = 227 * 1024, 1024
"""Shared memory of a program on Hopper, for which the tiles below were chosen, and a kernel's own share of it."""
CAPTURED = 2**20
"""Counters of a device's graphs, 4 MB: a step of 16 layers takes some 2,000."""


class GemmTile(NamedTuple):
    """Tile config: weight rows per program, columns per tile, split-K warps and programs, warps and stages."""

    block_n: int
    block_k: int
    warps_k: int
    split: int
    warps: int
    stages: int


class GemmShape(NamedTuple):
    """What a tile is chosen by: rows of the result, width, rows of x rounded up, gated or not, bits of a number of the
    weight."""

    n_out: int
    width: int
    block_m: int
    is_gated: bool
    bits: int = 16


class Kinds(NamedTuple):
    """Tiles for weights of many rows, of so few that each multiprocessor has 16 of them, and of some between."""

    many: GemmTile
    some: GemmTile
    few: GemmTile


MANY, MOST_ROWS = 8192, 65536
WORD_TILES = Kinds(*[GemmTile(64, GROUP, 1, split, 4, 3) for split in (1, 8, 8)])
MOST_WORD_TILE = GemmTile(128, GROUP, 1, 1, 4, 3)
CODE_TILES = Kinds(GemmTile(32, 256, 4, 1, 4, 3), GemmTile(32, 256, 4, 1, 4, 4), GemmTile(16, 256, 4, 1, 4, 7))
"""Tiles for codes of 4 bits, of a head's rows, and for codes of 8 bits by nine to sixteen rows, whose tiles of 16 bits take
up to twice as long."""
FASTEST = {
    8: Kinds(GemmTile(64, 128, 1, 1, 4, 4), GemmTile(16, 256, 4, 1, 4, 6), GemmTile(16, 256, 4, 1, 4, 9)),
    16: Kinds(GemmTile(128, 64, 1, 1, 4, 5), GemmTile(64, 128, 1, 2, 4, 5), GemmTile(16, 256, 4, 1, 4, 7)),
    32: Kinds(GemmTile(64, 128, 1, 1, 4, 3), GemmTile(64, 64, 1, 2, 4, 8), GemmTile(64, 64, 1, 4, 4, 8)),
    64: Kinds(GemmTile(64, 128, 1, 1, 4, 3), GemmTile(64, 128, 1, 2, 4, 6), GemmTile(64, 128, 1, 4, 4, 6)),
}
"""Tiles by rows of x rounded up, of about 30 each that were timed on an H200 with the products of a 1B model
(docs/benchmarks/row_linear.json)."""
BITS = {torch.int8: 8, torch.int16: 4}
"""Of a number of the weight, by the dtype of what holds its codes."""
_tiles: dict[GemmShape, GemmTile] = {}


@triton.jit
def _load(ptr, mask, POLICY: tl.constexpr, IS_WHOLE: tl.constexpr):
    if IS_WHOLE:
        return tl.load(ptr, eviction_policy=POLICY)
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy=POLICY)


@triton.jit
def _numbers(word, field: tl.constexpr, scale, zero):
    """Return q s + z of the codes in one field of words, in fp32.

    At bits 16 to 19 of a number with 128 as its leading digit a code counts ones, so that no integer is converted, which
    takes four times as long. `zero` has 128 s subtracted.
    """
    places = word << (16 - 4 * field)
    codes = ((places & 0xF0000) | 0x43000000).to(tl.float32, bitcast=True)
    return codes * scale[:, None] + zero[:, None]


@triton.jit
def _tiles_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    y_ptr,
    parts_ptr,
    counts_ptr,
    n_out,
    width,
    rows,
    GATED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS_K: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    OF_WORDS: tl.constexpr,
):
    """With OF_WORDS the weight is words of four codes, and BLOCK_K a group of them that shares a scale and a zero."""
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    HALF: tl.constexpr = BLOCK_N // 2
    PART: tl.constexpr = BLOCK_K // WARPS_K
    tile, split = tl.program_id(0), tl.program_id(1)
    i, m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    if GATED:  # half a tile of gate rows, half of up rows
        n = tl.minimum(tile * HALF + i % HALF, n_out - 1) + (i // HALF) * n_out
    else:
        n = tl.minimum(tile * BLOCK_N + i, n_out - 1)
    row_at = n.to(tl.int64) * (width // 4 if OF_WORDS else width)
    x_row = tl.minimum(m, rows - 1) * width
    steps = tl.cdiv(tl.cdiv(width, BLOCK_K), SPLIT)
    if OF_WORDS:
        WORDS: tl.constexpr = BLOCK_K // 4
        j, first = tl.arange(0, WORDS), split * steps
        weight_at = weight_ptr + (row_at[:, None] + j[None, :]) + first * WORDS
        x_at = x_ptr + (x_row[:, None] + j[None, :]) + first * BLOCK_K
        # Scale and zero in one load, as copies that run ahead take four bytes at least.
        scale_at = scale_ptr.to(tl.pointer_type(tl.int32)) + n.to(tl.int64) * (width // BLOCK_K) + first
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    elif WARPS_K > 1:  # a product of [W, N, K / W] and [W, K / W, M]: every warp has one of W
        part = (tl.arange(0, WARPS_K) * PART)[:, None, None] + tl.arange(0, PART)[None, None, :]
        k = part + split * steps * BLOCK_K
        weight_at, x_at = weight_ptr + (row_at[None, :, None] + k), x_ptr + (x_row[None, :, None] + k)
        acc = tl.zeros((WARPS_K, BLOCK_N, BLOCK_M), tl.float32)
    else:
        k = tl.arange(0, BLOCK_K)[None, :] + split * steps * BLOCK_K
        weight_at, x_at = weight_ptr + (row_at[:, None] + k), x_ptr + (x_row[:, None] + k)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    column = tile * HALF + tl.arange(0, HALF) if GATED else tile * BLOCK_N + i
    at = m[None, :] * n_out + column[:, None]
    mask = (m < rows)[None, :] & (column < n_out)[:, None]
    if residual_ptr is not None:
        held = tl.load(residual_ptr + at, mask=mask, other=0.0)
    for step in tl.range(0, steps, num_stages=STAGES):
        if OF_WORDS:
            inside = (first + step) * BLOCK_K < width
            word = _load(weight_at + step * WORDS, inside, "evict_first", IS_WHOLE).to(tl.int32)
            pair = _load(scale_at + step, inside, "evict_first", IS_WHOLE)
            scale = (pair << 16).to(tl.float32, bitcast=True)
            zero = (pair & -65536).to(tl.float32, bitcast=True) - 128.0 * scale
            for field in tl.static_range(4):
                x = _load(x_at + step * BLOCK_K + field * WORDS, inside, "evict_last", IS_WHOLE)
                weight = _numbers(word, field, scale, zero).to(DTYPE)
                acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            by = step * BLOCK_K
            inside = k + by < width
            weight = _load(weight_at + by, inside, "evict_first", IS_WHOLE)
            x = _load(x_at + by, inside, "evict_last", IS_WHOLE)
            if scale_ptr is not None:  # codes, which 16 bits hold exactly
                weight = weight.to(DTYPE)
            if WARPS_K > 1:
                acc = tl.dot(weight, tl.permute(x, (0, 2, 1)), acc, input_precision="ieee")
            else:
                acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    y = tl.sum(acc, axis=0) if WARPS_K > 1 else acc
    if SPLIT > 1:
        inner = i[:, None] * BLOCK_M + m[None, :]
        parts = parts_ptr + (tile * SPLIT).to(tl.int64) * (BLOCK_N * BLOCK_M)
        tl.store(parts + split * (BLOCK_N * BLOCK_M) + inner, y)
        tl.debug_barrier()  # all of the program's threads have stored before one of them counts it
        if tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel", scope="gpu") != SPLIT - 1:
            return
        y = tl.load(parts + inner, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            y += tl.load(parts + other * (BLOCK_N * BLOCK_M) + inner, cache_modifier=".cg")
        tl.store(counts_ptr + tile, 0)
    if scale_ptr is not None and not OF_WORDS:
        y *= tl.load(scale_ptr + n)[:, None]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n)[:, None].to(tl.float32)
    y = y.to(DTYPE).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_M)), (1, 2, 0)))
        y = (gate / (1.0 + tl.exp(-gate)) * up).to(DTYPE).to(tl.float32)
    if residual_ptr is not None:
        y += held.to(tl.float32)
    tl.store(y_ptr + at, y.to(DTYPE), mask=mask)


_launches = Launches(_tiles_kernel)
_counters: dict[tuple[int, int], Tensor] = {}
"""Counters of split-K programs per device and stream: zeros between launches, which one stream runs in order."""
_captured: dict[int, list[Tensor]] = {}
"""Counters for launches in graphs, per device: separate ones, as graphs may be replayed concurrently. The last buffer
has free ones; the others stay allocated, as graphs hold only their addresses."""


def heuristic_tile(product: GemmShape) -> GemmTile:
    """Return the tile of a product that nobody has measured: what a product of its kind was fastest by."""
    n_out, width, block_m, is_gated, bits = product
    n_rows = n_out * (2 if is_gated else 1)
    kinds = WORD_TILES if bits == 4 else CODE_TILES if bits == 8 and block_m == 16 else FASTEST[block_m]
    if n_rows >= MANY:
        return MOST_WORD_TILE if bits == 4 and n_rows >= MOST_ROWS else kinds.many
    is_one_each = -(-n_rows // 16) <= PROCESSORS
    tile = kinds.few if is_one_each else kinds.some
    # A program that shares the width takes four tiles of it at least.
    return tile._replace(split=max(1, min(tile.split, width // (4 * tile.block_k))))


def tile_of(product: GemmShape) -> GemmTile:
    """Return the tile of a product as it was adopted, else a heuristic_tile one, which stays."""
    tile = _tiles.get(product)
    if tile is None:
        tile = _tiles[product] = heuristic_tile(product)
    return tile


def fitting(tile: GemmTile, block_m: int, shared_bytes: int, bits: int = 16) -> GemmTile:
    """Return a tile with as many stages, two at least, as this much shared memory holds."""
    stage = (tile.block_n * bits // 8 + block_m * 2) * tile.block_k
    return tile._replace(stages=max(2, min(tile.stages, (shared_bytes - LEEWAY) // stage)))


@functools.cache
def _tile_on(device: torch.device, product: GemmShape) -> GemmTile:
    """Return the tile of a product, with as many stages as a device holds."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    shared_bytes = SHARED_BYTES if properties is None else properties.shared_memory_per_block_optin
    # Codes of 8 bits have the tiles of 16, stages and all, which were measured.
    return fitting(tile_of(product), product.block_m, shared_bytes, 4 if product.bits == 4 else 16)


def load_tuned(entries: dict[GemmShape, GemmTile]) -> None:
    """Use measured tiles; later launches choose again."""
    _tiles.update(entries)
    _tile_on.cache_clear()
    _launches.made.clear()


def block_of(rows: int) -> int:
    """Return how many rows the kernel computes for some of them."""
    return max(8, 1 << (rows - 1).bit_length())


def _counts(x: Tensor, tiles: int) -> Tensor | None:
    """Return zeroed counters that no other launch counts by meanwhile; None where there are none left for a graph, or
    it is captured before any call of its device."""
    device = x.get_device()
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        n = -(-tiles // 4) * 4  # a kernel is compiled for whether they begin at sixteen bytes
        if device not in _captured or _captured[device][-1].numel() < n:
            return None
        left = _captured[device][-1]
        _captured[device][-1] = left[n:]
        return left[:n]
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else 0
    counts = _counters.get((device, stream))
    if counts is None:
        counts = _counters[device, stream] = torch.zeros(MOST_TILES, dtype=torch.int32, device=x.device)
    blocks = _captured.setdefault(device, [])
    if not blocks or blocks[-1].numel() < CAPTURED // 4:
        blocks.append(torch.zeros(CAPTURED, dtype=torch.int32, device=x.device))
    return counts


def small_batch_gemm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float | None,
    gated: bool,
    y: Tensor,
) -> Tensor:
    """Run `small_batch_linear` on contiguous 16-bit tensors into y, and return y.

    The weight may be int8, or int4 in groups of GROUP inputs.
    """
    width, n_out = x.shape[-1], y.shape[-1]
    rows = x.numel() // width
    block_m = block_of(rows)
    bits = BITS.get(weight.dtype, 16)
    tile = _tile_on(x.device, GemmShape(n_out, width, block_m, gated, bits))
    tiles = -(-n_out // (tile.block_n // 2 if gated else tile.block_n))
    parts = counts = None
    if tile.split > 1:
        counts = _counts(x, tiles) if tiles <= MOST_TILES else None
        if counts is None:
            tile = tile._replace(split=1)
        else:
            n_parts = tiles * tile.split * tile.block_n * block_m
            parts = torch.empty(n_parts, dtype=torch.float32, device=x.device)
    if eps is not None:
        x = rms_norm(x, norm, eps)[0]
    given = (scale is None, bias is None, residual is None)
    key = (rows, n_out, width, gated, x.get_device(), x.dtype, given, bits, tile.split)
    launch = _launches.get(key)
    if launch is None:
        is_whole = width % (tile.block_k * tile.split) == 0
        launch = _launches.add(
            *(key, (tiles, tile.split), (n_out, width, rows)),
            *(gated, is_whole, block_m, *tile[:4], tile.stages, bits == 4),
            num_warps=tile.warps,
        )
    launch(x, weight, scale, bias, residual, y, parts, counts)
    return y
