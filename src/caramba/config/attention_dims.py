"""Modes of attention, and the widths per head and per cached token that a layer of one has."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from caramba.config.kvcache import Streams

FUSED_WIDEST = 256
"""Widest keys and values that flash and cuDNN take; the kernel that keeps keys in two parts takes wider ones."""
PART_NARROWEST, PART_WIDEST = 16, {"sem": 128, "geo": 256, "value": 128}
"""What that kernel takes of each part, powers of two."""


class AttentionMode(StrEnum):
    """How queries, keys and values are projected and what is cached."""

    STANDARD = "standard"
    GQA = "gqa"
    DECOUPLED = "decoupled"
    BOTTLENECK = "bottleneck"


@dataclass(frozen=True)
class AttentionDims:
    """Widths of one attention layer, derived once from its config.

    Per head: `qk` (query and key), `v`; cached streams as (name, heads, width per head), all in elements.
    `first_streams` are stored besides, of the first `first_tokens` tokens of a sequence alone.
    """

    n_heads: int
    n_kv_heads: int
    qk: int
    v: int
    rope: int
    streams: Streams
    first_tokens: int = 0
    first_streams: Streams = ()

    @property
    def cached(self) -> int:
        """Elements that the cache stores per token, all streams and heads together."""
        return sum(heads * width for _, heads, width in self.streams)


def align_width(width: int) -> int:
    """Return the next multiple of 8, the widths that fused backends take."""
    return -(-width // 8) * 8
