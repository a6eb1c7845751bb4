"""The byte layouts that other software reads: ggml's q8_0 and q4_0 blocks, and bitsandbytes' NF4."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.ops.formats import StoredFormat, get_block_format, pack_nibbles, unpack_nibbles


def to_ggml(codes: Tensor, scales: Tensor, kind: str) -> Tensor:
    """Return whole blocks as ggml stores them, the fp16 scale's two bytes (low first) and then the codes.

    Shape: codes [..., N, code_width], scales [..., N] to uint8 [..., N * (2 + code_width)].

    Raises:
        ConfigError: ggml has no such format, or codes and scales that are not of it.
    """
    _need_ggml(kind)
    _need_blocks(f"ggml {kind}", codes, scales, get_block_format(kind))
    return torch.cat((scales.unsqueeze(-1).view(torch.uint8), codes.view(torch.uint8)), dim=-1).flatten(-2)


def from_ggml(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Undo `to_ggml`: uint8 [..., N * (2 + code_width)] to (codes, scales).

    Raises:
        ConfigError: ggml has no such format, or bytes that are not whole blocks.
    """
    _need_ggml(kind)
    stored = get_block_format(kind)
    size = stored.block.code_bytes + stored.block.scale_bytes
    if blocks.dtype != torch.uint8 or blocks.dim() < 1 or blocks.shape[-1] % size:
        raise ConfigError(
            f"ggml {kind}: got {blocks.dtype} of shape {tuple(blocks.shape)}, expected uint8 rows of a multiple of "
            f"{size} bytes"
        )
    each = blocks.unflatten(-1, (-1, size))
    scales = each[..., : stored.block.scale_bytes].contiguous().view(stored.scale_dtype).squeeze(-1)
    return each[..., stored.block.scale_bytes :].contiguous().view(stored.code_dtype), scales


def to_bitsandbytes(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Return NF4 codes as bitsandbytes packs them, two neighbours per byte, the first high, and the maxima.

    Shape: codes uint8 [..., N, 32], scales fp32 [..., N] to uint8 [..., N * 32] and fp32 [..., N].

    Raises:
        ConfigError: codes and scales that are not NF4's.
    """
    _need_blocks("bitsandbytes nf4", codes, scales, get_block_format(KVCacheKind.NF4))
    pairs = unpack_nibbles(codes).unflatten(-1, (-1, 2))
    return ((pairs[..., 0] << 4) | pairs[..., 1]).flatten(-2), scales


def from_bitsandbytes(packed: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `to_bitsandbytes`.

    Raises:
        ConfigError: bytes and maxima that do not belong together.
    """
    width = get_block_format(KVCacheKind.NF4).code_width
    whole = (*scales.shape[:-1], width * scales.shape[-1]) if scales.dim() else None
    if packed.dtype != torch.uint8 or scales.dtype != torch.float32 or tuple(packed.shape) != whole:
        raise ConfigError(
            f"bitsandbytes nf4: got {packed.dtype} of shape {tuple(packed.shape)} with maxima {scales.dtype} "
            f"{tuple(scales.shape)}, expected uint8 with {width} bytes for each maximum, and those in float32"
        )
    each = packed.unflatten(-1, (-1, width))
    return pack_nibbles(torch.stack((each >> 4, each & 0x0F), dim=-1).flatten(-2)), scales


def _need_blocks(name: str, codes: Tensor, scales: Tensor, stored: StoredFormat) -> None:
    dtypes = (codes.dtype, scales.dtype) == (stored.code_dtype, stored.scale_dtype)
    if not dtypes or tuple(codes.shape) != (*scales.shape, stored.code_width) or not scales.dim():
        raise ConfigError(
            f"{name}: got codes {codes.dtype} {tuple(codes.shape)} and scales {scales.dtype} {tuple(scales.shape)}, "
            f"expected {stored.code_dtype} [..., N, {stored.code_width}] and {stored.scale_dtype} [..., N]; pass what "
            "quantize returned"
        )


def _need_ggml(kind: str) -> None:
    if kind not in (KVCacheKind.Q8_0, KVCacheKind.Q4_0):
        raise ConfigError(f"ggml has no blocks of kind {kind}; use q8_0 or q4_0")
