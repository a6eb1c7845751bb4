"""Launch configs of `caramba::dba_decode` in CUDA C++: which formats they read, and candidates for autotuning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import caramba.kernels.cuda.heads as heads
import caramba.kernels.cuda.latent as latent
from caramba.kernels.cuda.blocks import TAKEN, TOKENS

if TYPE_CHECKING:
    from caramba.kernels.triton.dba_decode_table import DecodeConfig

Config = tuple[int, int, int, int]
OF_HEADS = (12, 3, 1, 0), (12, 2, 1, 0), (8, 3, 1, 0), (6, 2, 2, 0), (4, 3, 2, 0), (4, 2, 4, 0)
"""Warps, tiles that each holds, blocks that a multiprocessor has place for, and the variant."""
OF_NF4 = (12, 2, 1, 3), (8, 2, 2, 3), (4, 2, 3, 3), (12, 2, 1, 2), (4, 2, 3, 2), (4, 2, 3, 0), (4, 3, 2, 0)
"""The same of values in nf4: with a table, of keys too or of values alone, or without one where tiles are few."""
OF_WIDE_HEADS = (6, 2, 1, 0), (4, 3, 1, 0), (8, 2, 1, 0), (8, 2, 1, 3)
"""The same of heads so wide that of all these at most one has place, where tables serve nf4 alone."""
USUAL = (8, 3, 1, 0), (6, 2, 1, 0), (4, 3, 1, 0)
USUAL_NF4 = (8, 2, 2, 3), (8, 2, 1, 3)
"""Heads configs that were best, or near it, in most measured shapes. The first of NF4 is for narrow heads."""
USUAL_LATENTS = (2**18, (12, 1, 1, 1)), (2**15, (8, 1, 1, 1))
"""The same of latents, from how many tokens on."""
OF_LATENTS = (12, 1, 1, 1), (12, 2, 1, 1), (8, 1, 1, 1), (8, 1, 1, 0), (4, 1, 3, 1)
"""The same of latents, those that were best somewhere; stages are tiles of the geometric stream."""
GROUPED = 1
"""The variant of a latent whose products are those of four warps at once, by instructions that Hopper alone has."""
LATENT_TILES = 2
"""Tiles of the latent that a warp holds, where there is place: one is read by others while the next one comes."""
WIDE_FROM = 64
"""Features up to which a head is not wide."""
COUNTED = 1, 2, 3, 4
"""Blocks worth timing, in how many a multiprocessor has place for."""
LEAST_ROWS, MOST_LATENT_ROWS = 16, 32
"""Rows of a product, for which a latent is read, and of a program."""


def heads_config(config: DecodeConfig) -> heads.HeadsConfig:
    """Return how a choice reads heads."""
    return heads.HeadsConfig(config.n_warps, config.n_stages, config.in_cuda, config.variant)


def latent_config(config: DecodeConfig) -> latent.LatentConfig:
    """Return how a choice reads a latent, whose tail is a split of its own where there are several."""
    return latent.LatentConfig(
        rows=config.block_rows, warps=config.n_warps, blocks=config.in_cuda, grouped=config.variant == GROUPED,
        stages=(LATENT_TILES, config.n_stages), tail_apart=config.n_splits > 1,
    )  # fmt: skip


def can_read(config: DecodeConfig, formats: Sequence[str], dims: Sequence[int], kv_heads: int, rows: int) -> bool:
    """Whether a choice can read streams of these formats and widths in CUDA, for `rows` queries of a key/value head."""
    if config.block_tokens != TOKENS:
        return False
    if len(formats) == 2:
        return kv_heads == 1 and latent.fits(formats, dims[:2], latent_config(config))
    return heads.fits(formats, dims, kv_heads, rows, heads_config(config))


def shared_bytes(config: DecodeConfig, formats: Sequence[str], dims: Sequence[int], rows: int) -> int:
    """Return the shared memory of a block."""
    if len(formats) == 2:
        return latent.shared_bytes(formats, dims[:2], latent_config(config))
    return heads.shared_bytes(formats, dims, rows, heads_config(config))


def candidates(
    like: DecodeConfig, formats: Sequence[str], dims: Sequence[int], rows: int, per_sm_bytes: int
) -> list[DecodeConfig]:
    """Return the configs worth timing: as many blocks as they say have place in a multiprocessor's shared memory."""
    if len(formats) == 2:
        return _fitting(OF_LATENTS, like, formats, dims, rows, per_sm_bytes)
    of_wide = tuple(way for way in OF_WIDE_HEADS if not way[-1] or formats[-1] == "nf4")
    configs = OF_NF4 if formats[-1] == "nf4" else OF_HEADS
    if max(dims) > WIDE_FROM:
        configs += of_wide
    # Of several streams of 64 features, tiles of none of the former may have place.
    found = _fitting(configs, like, formats, dims, rows, per_sm_bytes)
    return found or _fitting(of_wide, like, formats, dims, rows, per_sm_bytes)


def _fitting(
    configs: Iterable[Config],
    like: DecodeConfig,
    formats: Sequence[str],
    dims: Sequence[int],
    rows: int,
    per_sm_bytes: int,
) -> list[DecodeConfig]:
    """Return the configs that can read such streams, and whose blocks have place together."""
    is_latent = len(formats) == 2
    block_rows = min(MOST_LATENT_ROWS, max(LEAST_ROWS, like.block_rows)) if is_latent else heads.MOST_ROWS
    found = []
    for n_warps, n_stages, blocks, variant in configs:
        way = replace(
            like, block_rows=block_rows, block_tokens=TOKENS, n_warps=n_warps, n_stages=n_stages, n_registers=0,
            n_heads=1 if is_latent else 2, in_cuda=blocks, variant=variant,
        )  # fmt: skip
        if can_read(way, formats, dims, 1 if is_latent else 2, rows) and (
            blocks * (shared_bytes(way, formats, dims, rows) + TAKEN) <= per_sm_bytes
        ):
            found.append(way)
    return found


def with_tail(n_shares: int, formats: Sequence[str]) -> int:
    """Return the splits that take as many shares of the blocks: one more has the tail, of a latent where they are not
    few."""
    return n_shares + (len(formats) > 2 or n_shares + 1 >= latent.FEW_SPLITS)


def heuristic_config(
    like: DecodeConfig,
    formats: Sequence[str],
    dims: Sequence[int],
    rows: int,
    n_tokens: int,
    per_sm_bytes: int,
) -> DecodeConfig | None:
    """Return the default config of a shape without measurements, or None if Triton's is better.

    `n_tokens` counts those of all sequences' key/value heads. None also where no config can read the streams.

    Tiles of other widths are read as those are, and products of up to eight queries of heads, 32 of latents, take the
    registers that those of four and 32 do.
    """
    if len(formats) == 2:
        wanted = [way for least, way in USUAL_LATENTS if n_tokens >= least and rows <= MOST_LATENT_ROWS]
    else:
        of_nf4 = USUAL_NF4[max(dims) > WIDE_FROM :] if formats[-1] == "nf4" else ()
        wanted = [*of_nf4, *USUAL]
    return next(iter(_fitting(wanted, like, formats, dims, rows, per_sm_bytes)), None)
