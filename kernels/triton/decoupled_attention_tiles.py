"""Tiles of `decoupled_attention`: how they are read, how large they are, and what its launchers say of streams."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
COUNTS = ("n_queries", "n_keys", "n_tiles")
"""Arguments that differ from prompt to prompt: kernels are not specialised on them."""
SPARE = 2048
"""Bytes of shared memory that are for no tile."""


@triton.jit
def place_of(n_tiles, n_heads):
    """A program's tile, batch row and head: the tiles of a head side by side, so that they share its other side in the
    L2. All on one axis of the grid, as the others have 65,535 places."""
    row = tl.program_id(0) // n_tiles
    return tl.program_id(0) % n_tiles, (row // n_heads).to(tl.int64), row % n_heads


@triton.jit
def head_of(ptr, batch, head, n_heads, n_own, batch_stride, head_stride):
    """Where the head begins, of the n_own of a stream, that a query head reads."""
    return ptr + batch * batch_stride + (head // (n_heads // n_own)).to(tl.int64) * head_stride


@triton.jit
def keys_of(
    first_ptr,
    batch,
    tile,
    n_queries,
    n_keys,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_FIRST: tl.constexpr,
):
    """What a tile of queries sees: the last and the first key of each, where their tiles of keys begin, where those end
    that every query sees whole, and the end of all."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    before = n_keys - n_queries
    place = row + before
    end = tl.minimum((tile + 1) * BLOCK_M, n_queries) + before
    if HAS_FIRST:
        at = first_ptr + batch * n_queries
        lowest = tl.load(at + row, mask=row < n_queries, other=0).to(tl.int32)
        begin = tl.load(at + tile * BLOCK_M).to(tl.int32) // BLOCK_N * BLOCK_N
        whole = begin
    else:
        lowest = place
        begin = 0
        whole = (tile * BLOCK_M + before + 1) // BLOCK_N * BLOCK_N
    return place, lowest, begin, whole, end


@triton.jit
def tile_of(ptr, rows, row_stride, n_rows, WIDTH: tl.constexpr, IS_PART: tl.constexpr):
    """Rows of a stream, [rows, WIDTH]; with IS_PART zeros beyond the last of them."""
    at = ptr + rows[:, None].to(tl.int64) * row_stride + tl.arange(0, WIDTH)[None, :]
    if IS_PART:
        tile = tl.load(at, mask=(rows < n_rows)[:, None], other=0.0)
    else:
        tile = tl.load(at)
    return tile


def widths_of(k_sem: Tensor, k_geo: Tensor, v: Tensor) -> dict[str, int]:
    """Features of both parts of a key and of a value: powers of two, which the op sees to.

    With others, beyond which a tile would be masked, Triton 3.6 gave wrong values for some (24 + 40 and 24).
    """
    return {"A": k_sem.shape[-1], "G": k_geo.shape[-1], "D": v.shape[-1]}


def by_features(*streams: Tensor) -> tuple[Tensor, ...]:
    """The streams, their features side by side."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in streams)


def strides_of(*streams: Tensor) -> list[int]:
    return [stride for x in streams for stride in x.stride()[:3]]


class AttentionTile(NamedTuple):
    """Queries and keys of a tile, warps, and tiles on their config at a time."""

    queries: int
    keys: int
    n_warps: int
    n_stages: int

    @property
    def options(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.queries,
            "BLOCK_N": self.keys,
            "num_warps": self.n_warps,
            "num_stages": self.n_stages,
        }


# The first that a device's shared memory holds is taken; on an H200 they were the fastest of those tried, in this order.
FORWARD = (
    AttentionTile(128, 64, 8, 3),
    AttentionTile(128, 64, 8, 2),
    AttentionTile(128, 32, 8, 2),
    AttentionTile(64, 32, 4, 2),
    AttentionTile(32, 32, 4, 2),
)
KEYS = (
    AttentionTile(32, 128, 8, 3),
    AttentionTile(32, 128, 8, 2),
    AttentionTile(32, 64, 4, 2),
    AttentionTile(16, 64, 4, 2),
    AttentionTile(16, 32, 4, 2),
    AttentionTile(16, 16, 4, 1),
)
QUERIES = (
    AttentionTile(128, 64, 8, 2),
    AttentionTile(64, 32, 4, 2),
    AttentionTile(32, 32, 4, 2),
    AttentionTile(32, 16, 4, 2),
    AttentionTile(16, 16, 4, 1),
)
INTERPRETED = AttentionTile(32, 16, 4, 1), AttentionTile(16, 32, 4, 1), AttentionTile(16, 32, 4, 1)
"""Small tiles for tests without a GPU, of which more are crossed."""


def shared_bytes(device: torch.device) -> int | None:
    """Return the shared memory that a program can have; None in the interpreter, which has no limits."""
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def fitting(configs: tuple[AttentionTile, ...], resident: str, x: Tensor, widths: dict[str, int]) -> AttentionTile:
    """Return the first config whose tiles fit in shared memory.

    Tiles of `resident` (queries or keys) count once, the others once per stage.
    """
    room = shared_bytes(x.device)
    if room is None:
        return INTERPRETED[(FORWARD, KEYS, QUERIES).index(configs)]
    room -= SPARE
    width = (widths["A"] + widths["G"] + widths["D"]) * x.element_size()
    for config in configs:
        once, often = (config.keys, config.queries) if resident == "keys" else (config.queries, config.keys)
        needed = width * (once + often * config.n_stages)
        if configs is FORWARD:  # which holds no values
            needed -= once * widths["D"] * x.element_size()
        else:
            needed += config.queries * config.keys * x.element_size()  # weights on their config to their product
        if needed <= room:
            return config
    return configs[-1]
