"""Formats of a key/value cache and their exact storage size, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Annotated

from pydantic import AfterValidator, Strict


class KVCacheKind(StrEnum):
    """Storage format of one cached tensor. `mixed` and `auto` stand for a choice per tensor."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    NF4 = "nf4"
    MIXED = "mixed"
    AUTO = "auto"

    @classmethod
    def _missing_(cls, value: object) -> KVCacheKind | None:
        return {"q8": cls.Q8_0, "q4": cls.Q4_0}.get(str(value))


Stream = tuple[str, int, int]
"""Name, heads and width per head of one cached tensor."""

Streams = tuple[Stream, ...]

EXACT_KINDS = (KVCacheKind.FP32, KVCacheKind.FP16, KVCacheKind.BF16)

EXACT_BYTES = {KVCacheKind.FP32: 4, KVCacheKind.FP16: 2, KVCacheKind.BF16: 2}


@dataclass(frozen=True)
class BlockFormat:
    """A quantised format: elements of a block, bytes of their codes, bytes of the block's one scale.

    A token's row is padded with zeros to whole blocks, and the padding is stored, so it counts.
    """

    elements: int
    code_bytes: int
    scale_bytes: int

    def n_blocks(self, width: int) -> int:
        """Return the blocks that `width` elements take."""
        return -(-width // self.elements)

    def row_bytes(self, width: int) -> int:
        """Return the bytes that `width` elements take, scales and padding included."""
        return self.n_blocks(width) * (self.code_bytes + self.scale_bytes)


BLOCKS = {
    KVCacheKind.Q8_0: BlockFormat(32, 32, 2),
    KVCacheKind.Q4_0: BlockFormat(32, 16, 2),
    KVCacheKind.NF4: BlockFormat(64, 32, 4),
}


CacheKind = Annotated[KVCacheKind, Strict(False)]
"""A kind by its name, an alias included."""


def _quantised(kind: KVCacheKind) -> KVCacheKind:
    if kind not in BLOCKS and kind is not KVCacheKind.MIXED:
        raise ValueError(f"{kind} rounds to no blocks; use one of: {', '.join(BLOCKS)}, mixed, or null")
    return kind


CacheFormat = Annotated[CacheKind, AfterValidator(_quantised)]
"""A format that rounds: blocks of codes with a scale."""


def kind_of_stream(kind: KVCacheKind, stream: str) -> KVCacheKind:
    """Return the format that a stream such as `k_sem` or `c` takes: `mixed` is q8_0 for k_geo, q4_0 else."""
    if kind is KVCacheKind.MIXED:
        return KVCacheKind.Q8_0 if stream == "k_geo" else KVCacheKind.Q4_0
    return kind


def stream_bytes(stream: Stream, kind: KVCacheKind) -> int:
    """Return the bytes that one token adds to the cache of one stream.

    The blocks of a quantised kind run over the features of all heads side by side, so that heads narrower than a
    block share it; only the last block of a stream is padded.
    """
    name, heads, width = stream
    kind = kind_of_stream(kind, name)
    return BLOCKS[kind].row_bytes(heads * width) if kind in BLOCKS else heads * width * EXACT_BYTES[kind]


def bytes_of_streams(streams: Streams, kind: KVCacheKind) -> Fraction:
    """Return the exact bytes that one token adds to a cache of `streams`, block scales and padding included.

    Raises:
        ValueError: `kind` is `auto`, which has no size before a measurement has chosen a format.
    """
    if kind is KVCacheKind.AUTO:
        raise ValueError(
            "cache kind auto has no size before it is chosen; name one: fp32 fp16 bf16 q8_0 q4_0 nf4 mixed"
        )
    return Fraction(sum(stream_bytes(stream, kind) for stream in streams))
