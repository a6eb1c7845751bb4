"""Quantised block formats as tensors: one array of codes and one of scales, and what a code means."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.config.kvcache import BLOCKS, BlockFormat, KVCacheKind
from caramba.errors import ConfigError

# Quantiles of the normal distribution scaled to [-1, 1], zero among them: bin centres of equal probability mass
# (Dettmers et al., 2023, arXiv:2305.14314, appendix E).
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@functools.cache
def nf4_levels(device: torch.device) -> Tensor:
    """Return the levels, float32 [16], made once for a device: nothing is copied there as a graph is captured."""
    return torch.tensor(NF4_LEVELS, device=device)


@dataclass(frozen=True)
class StoredFormat:
    """Element types of a block format's two arrays, codes [..., N, code_width] and scales [..., N] for N blocks.

    A 4-bit block of E elements has byte j hold element j in its low and element j + E/2 in its high nibble.
    """

    kind: KVCacheKind
    block: BlockFormat
    code_dtype: torch.dtype
    scale_dtype: torch.dtype

    @property
    def code_width(self) -> int:
        """Codes per block as array elements, each of one byte."""
        return self.block.code_bytes


STORED = {
    KVCacheKind.Q8_0: StoredFormat(KVCacheKind.Q8_0, BLOCKS[KVCacheKind.Q8_0], torch.int8, torch.float16),
    KVCacheKind.Q4_0: StoredFormat(KVCacheKind.Q4_0, BLOCKS[KVCacheKind.Q4_0], torch.uint8, torch.float16),
    KVCacheKind.NF4: StoredFormat(KVCacheKind.NF4, BLOCKS[KVCacheKind.NF4], torch.uint8, torch.float32),
}


def get_block_format(kind: str) -> StoredFormat:
    """Return the format of a quantised kind.

    Raises:
        ConfigError: `kind` is not one.
    """
    for known, stored in STORED.items():
        if kind == known:
            return stored
    raise ConfigError(f"quantise: kind={kind} is not a block format; use one of: {', '.join(STORED)}")


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes 0..15 [..., E] into bytes [..., E/2]: the first half of a block low, the second high."""
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`: uint8 [..., E/2] to uint8 [..., E]."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)
