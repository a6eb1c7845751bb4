"""Kernel and launcher of `caramba::dequantize`: blocks of codes and scales back to rows of numbers."""

from __future__ import annotations

import functools

import torch
from caramba.kernels.triton.block_tables import BLOCKS, nf4_levels
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

BLOCKS_PER_PROGRAM = 32


@triton.jit
def _value(code, levels, KIND: tl.constexpr):
    if KIND == "nf4":
        value = tl.load(levels + code)
    elif KIND == "q8_0":
        value = code.to(tl.float32)
    else:
        value = code.to(tl.float32) - 8.0
    return value


@triton.jit
def _dequantize(
    codes, scales, levels, out, n_blocks, per_row, n_inner, width,
    codes_outer, codes_inner, codes_block, scales_outer, scales_inner, scales_block,
    KIND: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write BLOCK blocks of E elements, in two halves, to contiguous rows."""
    HALF: tl.constexpr = E // 2
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_block = block < n_blocks
    row, column = block // per_row, block % per_row
    outer, inner = row // n_inner, row % n_inner
    lane = tl.arange(0, HALF)[None, :]
    scale = tl.load(
        scales + outer * scales_outer + inner * scales_inner + column * scales_block, mask=is_block, other=0.0
    ).to(tl.float32)
    source = codes + (outer * codes_outer + inner * codes_inner + column * codes_block)[:, None] + lane
    first = tl.load(source, mask=is_block[:, None], other=0).to(tl.int32)
    if KIND == "q8_0":
        low, high = first, tl.load(source + HALF, mask=is_block[:, None], other=0).to(tl.int32)
    else:
        low, high = first & 15, first >> 4
    feature = (column * E)[:, None] + lane
    target = out + row[:, None] * width + feature
    dtype: tl.constexpr = out.dtype.element_ty
    low_value = (_value(low, levels, KIND) * scale[:, None]).to(dtype)
    high_value = (_value(high, levels, KIND) * scale[:, None]).to(dtype)
    tl.store(target, low_value, mask=is_block[:, None] & (feature < width))
    tl.store(target + HALF, high_value, mask=is_block[:, None] & (feature + HALF < width))


_launches = Launches(_dequantize)


def dequantize(codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """Return the dequantised numbers; a cache's codes [B, S, N, W] are read in place."""
    form = BLOCKS[kind]
    out = codes.new_empty((*codes.shape[:-2], width), dtype=dtype)
    if not out.numel():
        return out
    n_blocks, per_row = scales.numel(), scales.shape[-1]
    if codes.dim() != 4:
        codes, scales = codes.reshape(1, -1, *codes.shape[-2:]), scales.reshape(1, -1, per_row)
    if codes.stride(-1) != 1:
        codes = codes.contiguous()
    rows = (n_blocks, per_row, codes.shape[1], width)
    key = (kind, dtype, rows, codes.stride(), scales.stride(), codes.dtype, scales.dtype, codes.get_device())
    launch = _launches.get(key)
    if launch is None:
        grid = (-(-n_blocks // BLOCKS_PER_PROGRAM),)
        scalars = (*rows, *codes.stride()[:3], *scales.stride())
        launch = _launches.add(key, grid, scalars, kind, form.elements, BLOCKS_PER_PROGRAM)
    launch(codes, scales, _levels(codes.device), out)
    return out


@functools.cache
def _levels(device: torch.device) -> Tensor:
    return nf4_levels().to(device)
