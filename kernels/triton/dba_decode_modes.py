"""How decode attention reads a stream of a format and width: as scaled numbers of one head, or by words of several."""

from __future__ import annotations

import functools

from caramba.kernels.triton.dba_decode_table import DecodeConfig
from caramba.kernels.triton.dba_decode_words import FIELDS

BLOCK_ELEMENTS = {"q8_0": 32, "q4_0": 32, "nf4": 64}
LEAST_WORDS = 16
"""Features that a product of keys has at least."""

WordMode = tuple[str, int, int, int, int, int, int, int]
"""KIND, D, WORDS, E, PHASES, PER_BLOCK, HEADS, FIELDS of a stream, see `dba_decode_heads`."""
Mode = tuple[str, int, int, int, int, bool, bool]
"""KIND, D, P, E, SPREAD, HALVED, UNIFORM of a stream, see `dba_decode_tile`."""


@functools.cache
def mode(kind: str, width: int) -> Mode:
    """Return how a stream of this format and width per head is read.

    SPREAD is the number of scales of a head's token: one where a head is in one block, one for each block where
    it is whole blocks, and 0 where neither holds and every element looks its own up.
    """
    padded = max(16, power_of_2(width))
    elements = BLOCK_ELEMENTS.get(kind)
    if elements is None:
        return "exact", width, padded, 32, 0, False, False
    half = elements if kind == "q8_0" else elements // 2
    spread = 1 if elements % width == 0 else padded // elements if width % elements == 0 else 0
    halved = kind != "q8_0" and width % elements == 0 and padded >= 32
    return kind, width, padded, elements, spread, halved, half % width == 0


def heads_per_program(
    config: DecodeConfig, kinds: list[str], dims: tuple[int, int, int], kv_heads: int, rows: int
) -> int:
    """Return how many key/value heads of `rows` queries each a program reads by words, at most the config's.

    It is 0 where that is 0 and where they cannot be read so: all streams have to be quantised, heads to be whole blocks or
    even parts of one, and a phase to have words enough for a product.
    """
    n_heads = config.n_heads
    while n_heads and not (
        len(kinds) == 3
        and all(kind in BLOCK_ELEMENTS for kind in kinds)
        and kv_heads % n_heads == 0
        and n_heads * rows <= config.block_rows
        and all(_has_words(kind, d, n_heads) for kind, d in zip(kinds, dims, strict=True))
    ):
        n_heads //= 2
    return n_heads


def _has_words(kind: str, width: int, n_heads: int) -> bool:
    elements = BLOCK_ELEMENTS[kind]
    if (elements % width and width % elements) or n_heads * width % elements:
        return False
    return word_mode(kind, width, n_heads)[2] >= LEAST_WORDS


@functools.cache
def word_mode(kind: str, width: int, n_heads: int) -> WordMode:
    """Return how `n_heads` heads of this width are read by words of 16 bits, see `dba_decode_heads`."""
    elements = BLOCK_ELEMENTS[kind]
    phases = max(1, width // elements)
    blocks = n_heads * width // elements // phases
    per_block = elements // FIELDS[kind]
    return kind, width, blocks * per_block, elements, phases, per_block, n_heads, FIELDS[kind]


def is_latent_by_words(
    config: DecodeConfig, kinds: list[str], dims: tuple[int, int, int], kv_heads: int
) -> bool:
    """Whether a choice reads a latent by words, and it can be: two quantised streams of whole blocks, of powers of two that
    leave each product words enough."""
    return (
        config.n_heads > 0
        and len(kinds) == 2
        and kv_heads == 1
        and all(
            kind in FIELDS
            and d == power_of_2(d)
            and d % BLOCK_ELEMENTS[kind] == 0
            and d // FIELDS[kind] >= LEAST_WORDS
            for kind, d in zip(kinds, dims, strict=False)
        )
    )


@functools.cache
def latent_mode(kind: str, width: int) -> WordMode:
    """Return how a latent's stream is read by words of 16 bits, all of its blocks at once, see `dba_decode_latent`."""
    elements, fields = BLOCK_ELEMENTS[kind], FIELDS[kind]
    return kind, width, width // fields, elements, 1, elements // fields, 1, fields


def power_of_2(n: int) -> int:
    """Return the next power of two; Triton's own is one for its compiler too, at several microseconds a call."""
    return 1 << (n - 1).bit_length()
