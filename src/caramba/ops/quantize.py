"""The op `caramba::quantize`: rows of numbers to blocks of small codes with one scale each."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op
from caramba.ops.block_codes import block_codes, split_blocks
from caramba.ops.formats import StoredFormat, get_block_format, pack_nibbles


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantise the last axis in blocks, the last block padded with zeros.

    With m the element of largest magnitude of a block, s its scale, both formulas rounding half up:

        q8_0: s = |m| / 127, code = clamp(round(x / s), -127, 127)
        q4_0: s = m / -8,    code = clamp(round(x / s) + 8, 0, 15)
        nf4:  s = |m|,       code = index of the NormalFloat level nearest to x / s

    s is rounded to its stored type (fp16, for nf4 fp32) before it divides. The error of an element is at most
    |s|/2 for q8_0, |s| for q4_0 (half of it on the side of m), 0.152 s for nf4, plus what fp16 loses below 2^-14
    of s. A block that holds something not finite, or a scale above 65504, comes back as not finite, never as a
    wrong number.

    Shape: x [..., W] of any floating dtype to codes [..., N, code_width] (int8, or uint8 for 4 bits) and scales
    [..., N], with N = ceil(W / block).

    Raises:
        ConfigError: a kind that is not a block format, or x that is not floating point.

    Reference: Gerganov et al., ggml (q8_0, q4_0: same blocks and levels; ours divide by the rounded scale);
    Dettmers et al., 2023, arXiv:2305.14314 (NormalFloat).
    """
    _checked(x, kind)
    return call_op("quantize", x, str(kind))


def _fake(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    stored = _checked(x, kind)
    shape = (*x.shape[:-1], -(-x.shape[-1] // stored.block.elements))
    return (
        x.new_empty((*shape, stored.code_width), dtype=stored.code_dtype),
        x.new_empty(shape, dtype=stored.scale_dtype),
    )


@caramba_op("quantize", fake=_fake)
def reference_quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Compute `quantize` in plain PyTorch, in float32."""
    stored = _checked(x, kind)
    elements = stored.block.elements
    codes, scales = block_codes(split_blocks(x.float(), elements), stored.kind)
    return codes.to(torch.int8) if stored.kind is KVCacheKind.Q8_0 else pack_nibbles(codes), scales


def _checked(x: Tensor, kind: str) -> StoredFormat:
    stored = get_block_format(kind)
    if not x.is_floating_point() or x.dim() < 1:
        raise ConfigError(
            f"quantise: x is {x.dtype} of shape {tuple(x.shape)}, expected a floating dtype and one axis at least"
        )
    return stored
