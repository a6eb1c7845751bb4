"""Formats of a key/value cache and their exact storage size, without torch."""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction
from typing import Annotated, Any

from pydantic import BeforeValidator


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


Stream = tuple[str, int, int]
"""Name, heads and width per head of one cached tensor."""

Streams = tuple[Stream, ...]

KIND_ALIASES = {"q8": "q8_0", "q4": "q4_0"}
EXACT_KINDS = (KVCacheKind.FP32, KVCacheKind.FP16, KVCacheKind.BF16)

# q8_0 and q4_0 hold blocks of 32 elements with one fp16 scale, nf4 blocks of 64 with one fp32 maximum.
BYTES_PER_ELEMENT: dict[KVCacheKind, Fraction] = {
    KVCacheKind.FP32: Fraction(4),
    KVCacheKind.FP16: Fraction(2),
    KVCacheKind.BF16: Fraction(2),
    KVCacheKind.Q8_0: Fraction(34, 32),
    KVCacheKind.Q4_0: Fraction(18, 32),
    KVCacheKind.NF4: Fraction(36, 64),
}


def parse_kind(value: Any) -> Any:
    """Turn a name or alias of a cache kind into the enum member; pydantic checks other values itself."""
    if isinstance(value, str):
        name = KIND_ALIASES.get(value, value)
        if name in KVCacheKind._value2member_map_:
            return KVCacheKind(name)
    return value


CacheKind = Annotated[KVCacheKind, BeforeValidator(parse_kind)]


def kind_of_stream(kind: KVCacheKind, stream: str) -> KVCacheKind:
    """Return the format that a stream such as `k_sem` or `c` takes: `mixed` is q8_0 for k_geo, q4_0 else."""
    if kind is KVCacheKind.MIXED:
        return KVCacheKind.Q8_0 if stream == "k_geo" else KVCacheKind.Q4_0
    return kind


def bytes_of_streams(streams: Streams, kind: KVCacheKind) -> Fraction:
    """Return the exact bytes that one token adds to a cache of `streams`, its share of block scales included.

    Raises:
        ValueError: `kind` is `auto`, which has no size before a measurement has chosen a format.
    """
    if kind is KVCacheKind.AUTO:
        raise ValueError(
            "cache kind auto has no size before it is chosen; name one: fp32 fp16 bf16 q8_0 q4_0 nf4 mixed"
        )
    return sum(
        (heads * width * BYTES_PER_ELEMENT[kind_of_stream(kind, name)] for name, heads, width in streams),
        Fraction(0),
    )
