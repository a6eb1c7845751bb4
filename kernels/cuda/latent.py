"""How `decode_latent.cu` is compiled for a form: its macros, and the shared memory of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caramba.kernels.cuda.blocks import BLOCKS, MOST_SHARED, TAKEN, TOKENS

KINDS = {"q8_0": "Q8_0", "q4_0": "Q4_0", "nf4": "NF4"}
FIELDS = {"q8_0": 2, "q4_0": 4, "nf4": 4}
"""Codes in two bytes."""
TEAM = 4
"""Warps that multiply values together."""
FEW_SPLITS = 8
"""Fewer have no split for the tail alone: it would take more of their tokens than it has."""
REGISTERS, MOST_REGISTERS, OTHER_REGISTERS = 65536, 255, 96
"""Registers of a multiprocessor, of a lane at most, and of a lane besides weighed and dequantised values."""


@dataclass(frozen=True)
class LatentConfig:
    """How a block goes through its tokens.

    Attributes:
        rows: of a block, 16 or 32.
        warps: of a block, in teams of four, 16 at most.
        blocks: that a multiprocessor has place for.
        grouped: products are those of four warps at once, by instructions that Hopper alone has.
        stages: tiles of the latent and of the geometric stream that a warp holds at most: one of the latent where
            shared memory has no place for more.
        tail_apart: the last split of FEW_SPLITS and more has the tail, which is in 16 bits, and nothing else.
    """

    rows: int = 32
    warps: int = 8
    blocks: int = 1
    grouped: bool = True
    stages: tuple[int, int] = (2, 2)
    tail_apart: bool = True


def fits(kinds: Sequence[str], dims: Sequence[int], way: LatentConfig) -> bool:
    """True if the config can read streams of these formats and widths."""
    # Sums of weighed values, and the values of two tiles that products read: of 32 tokens for a fourth of the features.
    held = way.rows * dims[0] // (32 * TEAM) + dims[0] // TEAM
    registers = min(MOST_REGISTERS, REGISTERS // (32 * way.warps * way.blocks))
    return (
        len(kinds) == 2
        and way.rows in (16, 32)
        and all(kind in KINDS and _is_whole(kind, d) for kind, d in zip(kinds, dims, strict=False))
        and way.warps % TEAM == 0
        and dims[0] % (16 * TEAM) == 0
        and held + OTHER_REGISTERS <= registers
        and shared_bytes(kinds, dims, way) <= _most_shared(way)
    )


def _most_shared(way: LatentConfig) -> int:
    return (MOST_SHARED + TAKEN) // way.blocks - TAKEN


def _is_whole(kind: str, width: int) -> bool:
    """Return whether a width is whole blocks, and chunks of 16 bytes go to four lanes evenly."""
    if width <= 0 or width % BLOCKS[kind][0] or width % (8 * FIELDS[kind]):
        return False
    chunks = width // (8 * FIELDS[kind])
    return chunks == 2 or chunks % 4 == 0


def shared_bytes(kinds: Sequence[str], dims: Sequence[int], way: LatentConfig) -> int:
    """Return the bytes of shared memory of a block."""
    return _bytes_of(kinds, dims, way, _stages(kinds, dims, way))


def _stages(kinds: Sequence[str], dims: Sequence[int], way: LatentConfig) -> tuple[int, int]:
    """Return the tiles of both streams that a warp holds."""
    too_many = _bytes_of(kinds, dims, way, way.stages) > _most_shared(way)
    return (1, way.stages[1]) if too_many else way.stages


def _bytes_of(kinds: Sequence[str], dims: Sequence[int], way: LatentConfig, held: tuple[int, int]) -> int:
    tiles = sum(stages * _tile_bytes(kind, d) for kind, d, stages in zip(kinds, dims, held, strict=False))
    queries = sum(dims[:2]) // 16 * way.rows * 32
    weights = way.warps * TOKENS // 16 * way.rows * 32
    tail = _aligned(16 * (2 * max(dims[0], min(dims[1], 128)) + 16))
    read = queries + weights + way.warps * max(tiles, tail)
    met = way.warps // TEAM * way.rows * (4 * dims[0] + 16)
    return 128 + way.warps * way.rows * 8 + max(read, met)


def _tile_bytes(kind: str, width: int) -> int:
    elements, codes, scale = BLOCKS[kind]
    stored = width // elements * TOKENS * (codes + scale)
    return _aligned(stored)


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // 128) * 128


def macros(
    kinds: Sequence[str],
    dims: Sequence[int],
    way: LatentConfig,
    *,
    group: int,
    queries: int,
    has_window: bool,
    final: bool,
    in_bf16: bool,
    announced: bool = False,
) -> dict[str, object]:
    """Return the macros of the source.

    `in_bf16`: queries are bfloat16, else float16. `announced`: splits signal their end, so that the combine may begin
    early (PDL).
    """
    stages = _stages(kinds, dims, way)
    return {
        "SEM_KIND": KINDS[kinds[0]],
        "SEM_D": dims[0],
        "GEO_KIND": KINDS[kinds[1]],
        "GEO_D": dims[1],
        "ROWS": way.rows,
        "WARPS": way.warps,
        "BLOCKS": way.blocks,
        "GROUPED": int(way.grouped),
        "SEM_STAGES": stages[0],
        "GEO_STAGES": stages[1],
        "GROUP": group,
        "QUERIES": queries,
        "ROW_BLOCKS": -(-group * queries // way.rows),
        "HAS_WINDOW": int(has_window),
        "FINAL": int(final),
        "TAIL_APART": int(way.tail_apart),
        "FEW_SPLITS": FEW_SPLITS,
        "IN_BRAIN": int(in_bf16),
        "ANNOUNCED": int(announced),
        "SHARED_BYTES": shared_bytes(kinds, dims, way),
    }
