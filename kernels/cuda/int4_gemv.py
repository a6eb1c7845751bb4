"""How `int4_gemv.cu` is compiled for a product of codes of 4 bits: its macros, and the shared memory of a block."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

GROUP = 128
"""Inputs that share a scale, of weights that the kernel reads."""
MOST_WARPS = 16
PROCESSORS = 132
"""Multiprocessors of an H200."""
BLOCKS_AT_ONCE = 8
"""Blocks that a multiprocessor may be working on."""
NORMS = {"none": 0, "plain": 1, "same": 2, "wide": 3}
"""What a row is normalised by: nothing, its own size, that and a weight of its dtype or of float32."""


class Int4Shape(NamedTuple):
    """What a config is chosen by: rows of the result, width, rows of x as `most_rows` has them, gated or not."""

    n_out: int
    width: int
    rows: int
    is_gated: bool


class Int4Tile(NamedTuple):
    """Tiles of 16 weight rows per block, warps that split the width, and groups that each warp prefetches."""

    tiles: int
    warps: int
    ahead: int


def most_rows(rows: int) -> int:
    """Return how many rows the kernel computes for some of them: one, or products' columns."""
    return 1 if rows == 1 else 8 * -(-rows // 8)


def bits_of(x: float) -> int:
    """Return a number of 32 bits as an integer, which launches take."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(x)).value


def norm_kind(x: Tensor, norm: Tensor | None, eps: float | None) -> str:
    """Return which of `NORMS` a call asks for."""
    if eps is None:
        return "none"
    if norm is None:
        return "plain"
    return "wide" if norm.dtype == torch.float32 else "same"


def heuristic_tile(product: Int4Shape) -> Int4Tile:
    """Return the config of a product that nobody has measured.

    Two tiles share what a block does for x, where there are tiles enough for eight blocks on each multiprocessor. Warps
    take four groups each, or fewer where the device would not have eight warps on each. They ask for all of them ahead
    where more blocks wait than the device runs at once; elsewhere more warps per multiprocessor took less time than
    fewer with deeper prefetch, and with several rows the sums need the registers.
    """
    n_groups = product.width // GROUP
    n_tiles = -(-product.n_out // (8 if product.is_gated else 16))
    tiles = 2 if n_tiles >= 6 * PROCESSORS else 1
    warps = 1
    while warps < min(MOST_WARPS, n_groups) and (4 * warps < n_groups or warps * n_tiles // tiles < 8 * PROCESSORS):
        warps *= 2
    ahead = 2
    if product.rows <= 8:
        ahead = 4 if n_tiles // tiles > BLOCKS_AT_ONCE * PROCESSORS else 1
    return Int4Tile(tiles, warps, min(-(-n_groups // warps), ahead))


def shared_bytes(product: Int4Shape, config: Int4Tile, *, is_normed: bool) -> int:
    """Return the bytes of shared memory of a block: a normalised row, and the sums of its warps."""
    return (2 * product.width if is_normed else 0) + config.warps * config.tiles * 16 * product.rows * 4


def n_blocks(product: Int4Shape, config: Int4Tile) -> int:
    """Return how many blocks there are, each of some rows of the result."""
    return -(-product.n_out // ((8 if product.is_gated else 16) * config.tiles))


def macros(
    product: Int4Shape, config: Int4Tile, *, in_bf16: bool, norm: str, has_bias: bool, has_residual: bool
) -> dict[str, object]:
    """Return what the source is compiled with; `norm` is one of `NORMS`."""
    return {
        "N_GROUPS": product.width // GROUP,
        "MOST_ROWS": product.rows,
        "TILES": config.tiles,
        "WARPS": config.warps,
        "AHEAD": config.ahead,
        "BRAIN": int(in_bf16),
        "GATED": int(product.is_gated),
        "NORM": NORMS[norm],
        "HAS_BIAS": int(has_bias),
        "HAS_RESIDUAL": int(has_residual),
    }
