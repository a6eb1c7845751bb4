"""Autotuning candidates of Triton's decode attention, by storage format."""

from __future__ import annotations

READINGS = {
    # Tokens of a tile, warps, stages and registers. Without a limit a thread takes up to 255 registers in any of these,
    # for the sake of the masked tiles at the end, so that a multiprocessor holds eight warps at most.
    True: (
        *((128, 8, n_stages, 128) for n_stages in (2, 3)),
        *((128, 4, n_stages, 0) for n_stages in (2, 3)),
        *((64, 4, n_stages, 128) for n_stages in (2, 3)),
        *((64, 4, n_stages, 168) for n_stages in (2, 3)),
        *((64, 4, n_stages, 0) for n_stages in (2, 3)),
        *((64, 2, n_stages, 0) for n_stages in (2, 3)),
        *((32, 4, n_stages, 168) for n_stages in (2, 3)),
        (128, 4, 3, 128),
        (256, 8, 2, 0),
    ),
    False: (
        *((n, n_warps, n_stages, 0) for n in (32, 64, 128) for n_warps in (4, 8) for n_stages in (2, 3, 4)),
        *((64, 4, n_stages, 128) for n_stages in (2, 3)),
    ),
}
"""Tile configs worth timing, by whether any stream is quantised."""
OF_NARROW_HEADS = (256, 4, 2, 0), (256, 8, 3, 0), (64, 1, 4, 0), (128, 2, 2, 0)
NARROW = 128
"""The same of numbers of so few features, of which few tokens are few bytes in a row: fewer programs that read longer
runs of memory each; or as many programs as there are sequences' heads, of a warp or two that wait for no other."""
GROUPED = (
    *((128, 4, n_stages, 0) for n_stages in (2, 3)),
    *((128, 8, n_stages, 0) for n_stages in (2, 3)),
    *((64, 4, n_stages, 0) for n_stages in (2, 3, 4)),
    *((64, 4, n_stages, 168) for n_stages in (2, 3)),
    *((64, 8, n_stages, 0) for n_stages in (2, 3)),
    (128, 8, 2, 128),
)
"""The same for GROUP_ROWS rows, of which half may be empty: Hopper's warp-group products take no fewer."""
TOGETHER = (
    *((128, 4, n_stages, n_registers) for n_stages in (3, 2) for n_registers in (168, 0)),
    *((64, 4, n_stages, n_registers) for n_stages in (3, 4) for n_registers in (128, 168, 0)),
    *((64, 2, n_stages, 0) for n_stages in (2, 3)),
    *((32, n_warps, n_stages, 168) for n_warps in (2, 1) for n_stages in (3, 4)),
    (128, 4, 2, 128),
)
"""The same for heads of quantised streams that are read together."""
BY_WORDS = (
    *((64, 4, n_stages, n_registers) for n_stages in (3, 4) for n_registers in (168, 0)),
    *((64, 2, n_stages, 0) for n_stages in (3, 4)),
    *((128, 4, n_stages, n_registers) for n_stages in (3, 2) for n_registers in (168, 0)),
    *((32, 2, n_stages, n_registers) for n_stages in (3, 4) for n_registers in (168, 0)),
    (32, 1, 3, 0),
)
"""The same for a quantised latent whose codes go to products by words."""
MOST_ROWS_OF_WORDS = 32
"""Rows of a program that reads a latent by words: the sums of more take too many registers."""
MOST_TOGETHER = 4
"""Heads that are read together at most: the sums of more take too many registers."""
WIDEST_GROUPED = 384
"""Features of both parts up to which three stages of 64 tokens and the queries were measured, 196 KB in all."""
