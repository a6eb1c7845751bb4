"""The op `caramba::dequantize`: blocks of codes and scales back to rows of numbers."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op
from caramba.ops.formats import get_block_format, nf4_levels, unpack_nibbles


def dequantize(
    codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return the numbers that codes stand for: s * code, s * (code - 8), or s * level[code], rounded to `dtype` once.

    Shape: codes [..., N, code_width] and scales [..., N] to [..., width], with N = ceil(width / block); what pads
    the last block is dropped.

    Raises:
        ConfigError: a kind that is not a block format, codes and scales that are not of that kind and width, or
            numbers of a dtype that is not floating.
    """
    _check(codes, scales, kind, width)
    if not dtype.is_floating_point:
        raise ConfigError(f"dequantise: dtype is {dtype}, expected a floating one")
    return call_op("dequantize", codes, scales, str(kind), width, dtype)


def _fake(codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype) -> Tensor:
    _check(codes, scales, kind, width)
    return codes.new_empty((*codes.shape[:-2], width), dtype=dtype)


@caramba_op("dequantize", fake=_fake)
def reference_dequantize(codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """Compute `dequantize` in plain PyTorch, in float32."""
    _check(codes, scales, kind, width)
    if kind == KVCacheKind.Q8_0:
        values = codes.float()
    elif kind == KVCacheKind.Q4_0:
        values = unpack_nibbles(codes).float() - 8
    else:
        values = nf4_levels(codes.device)[unpack_nibbles(codes).int()]
    rows = (values * scales.float()[..., None]).to(dtype).flatten(-2)
    return rows[..., :width].contiguous()


def _check(codes: Tensor, scales: Tensor, kind: str, width: int) -> None:
    stored = get_block_format(kind)
    n_blocks = stored.block.n_blocks(width)
    expected = (*scales.shape[:-1], n_blocks, stored.code_width)
    if tuple(codes.shape) != expected or scales.shape[-1:] != (n_blocks,):
        raise ConfigError(
            f"dequantise: codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not hold {width} elements "
            f"of {kind}; expected codes [..., {n_blocks}, {stored.code_width}] and scales [..., {n_blocks}]"
        )
    wrong = (codes.dtype, scales.dtype) != (stored.code_dtype, stored.scale_dtype)
    if wrong or codes.device != scales.device:
        raise ConfigError(
            f"dequantise: codes are {codes.dtype} on {codes.device} and scales {scales.dtype} on {scales.device}, "
            f"{kind} has {stored.code_dtype} and {stored.scale_dtype} on one device; pass what quantize returned"
        )
