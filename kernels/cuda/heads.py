"""How `decode_heads.cu` is compiled for a form: its macros, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caramba.kernels.cuda.blocks import BLOCKS, MOST_SHARED, TOKENS, ZEROS

KINDS = {"q8_0": 0, "q4_0": 1, "nf4": 2}
TABLE_BYTES = 256 * 128
"""Of a table of two codes' numbers, a word for each lane."""
MOST_ROWS = 8
"""Queries of a key/value head: a product's columns."""
MOST_VALUES = 128
"""Features of a head's values: what a lane has registers for."""


@dataclass(frozen=True)
class HeadsConfig:
    """How a block goes through its tokens.

    Attributes:
        warps: each reads tokens of its own.
        stages: tiles that a warp holds.
        blocks: that a multiprocessor's registers are to have place for.
        tabled: of two chunks of nf4's values, those whose codes a table in shared memory makes numbers; 3 for both, and
            keys in nf4.
    """

    warps: int = 8
    stages: int = 3
    blocks: int = 1
    tabled: int = 0


def fits(kinds: Sequence[str], dims: Sequence[int], kv_heads: int, rows: int, way: HeadsConfig) -> bool:
    """True if the config can read streams of these formats and head widths, for `rows` queries of each head."""
    kinds, dims = _read(kinds, dims)
    return (
        len(kinds) == 3
        and all(kind in KINDS for kind in kinds)
        and kv_heads % 2 == 0
        and rows <= MOST_ROWS
        and all(_is_of_steps(kind, d) for kind, d in zip(kinds, dims, strict=True))
        and dims[2] % BLOCKS[kinds[2]][0] == 0
        and dims[2] <= MOST_VALUES
        and shared_bytes(kinds, dims, rows, way) <= MOST_SHARED
    )


def _read(kinds: Sequence[str], dims: Sequence[int]) -> tuple[Sequence[str], Sequence[int]]:
    """Return the formats and widths that are read: undivided keys have no second part."""
    if len(kinds) != 3 or kinds[1] != ZEROS:
        return kinds, dims
    return (kinds[0], kinds[0], kinds[2]), (dims[0], 0, dims[2])


def _is_of_steps(kind: str, width: int) -> bool:
    """Return whether a head is whole blocks or an even part of one, down to a quarter, in steps of sixteen features."""
    block = BLOCKS[kind][0]
    return width % 16 == 0 and (width % block == 0 or (block % width == 0 and block <= 4 * width))


def shared_bytes(kinds: Sequence[str], dims: Sequence[int], rows: int, way: HeadsConfig) -> int:
    """Return the bytes of shared memory of a block; warps hand over their sums where their tiles were."""
    kinds, dims = _read(kinds, dims)
    columns = 4 if rows <= 4 else 8
    table = TABLE_BYTES if way.tabled and kinds[2] == "nf4" else 0
    return way.warps * max(way.stages * _tile_bytes(kinds, dims), 2 * columns * (dims[2] + 2) * 4) + table


def _tile_bytes(kinds: Sequence[str], dims: Sequence[int]) -> int:
    planes = [max(d > 0, 2 * d // BLOCKS[kind][0]) for kind, d in zip(kinds, dims, strict=True)]
    return TOKENS * sum(n * sum(BLOCKS[kind][1:]) for kind, n in zip(kinds, planes, strict=True))


def macros(
    kinds: Sequence[str],
    dims: Sequence[int],
    way: HeadsConfig,
    *,
    kv_heads: int,
    group: int,
    queries: int,
    has_window: bool,
    final: bool,
    in_bf16: bool,
    tail_in_bf16: bool = True,
    announced: bool = False,
) -> dict[str, object]:
    """Return what the source is compiled with; queries and tails are bfloat16 or else float16."""
    kinds, dims = _read(kinds, dims)
    return {
        "KIND_SEM": KINDS[kinds[0]],
        "KIND_GEO": KINDS[kinds[1]],
        "KIND_V": KINDS[kinds[2]],
        "D_SEM": dims[0],
        "D_GEO": dims[1],
        "D_V": dims[2],
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "QUERIES": queries,
        "WARPS": way.warps,
        "STAGES": way.stages,
        "LEAST_BLOCKS": way.blocks,
        "TABLED": way.tabled if kinds[2] == "nf4" else 0,
        "BRAIN": int(in_bf16),
        "TAIL_BRAIN": int(tail_in_bf16),
        "HAS_WINDOW": int(has_window),
        "FINAL": int(final),
        "ANNOUNCED": int(announced),
    }
