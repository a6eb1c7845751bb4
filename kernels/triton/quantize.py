"""Kernel and launcher of `caramba::quantize`: blocks of numbers to codes and a scale, as the reference rounds them."""

from __future__ import annotations

import functools

import torch
from caramba.kernels.triton.block_tables import BLOCKS, nf4_middles
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

BLOCKS_PER_PROGRAM = 32


@triton.jit
def _code(x, scale, middles, KIND: tl.constexpr):
    """Return the code of every element; quotients that are not finite count as 0, as the scale shows."""
    safe = tl.where(scale == 0, 1.0, scale)
    value = tl.div_rn(x, tl.broadcast_to(safe[:, None], x.shape))
    value = tl.where(tl.abs(value) < float("inf"), value, 0.0)
    if KIND == "nf4":
        code = tl.zeros(x.shape, tl.int32)
        for i in tl.static_range(15):
            code += (value > tl.load(middles + i)).to(tl.int32)
    elif KIND == "q8_0":
        code = tl.minimum(tl.maximum(tl.floor(value + 0.5), -127.0), 127.0).to(tl.int32)
    else:
        code = tl.minimum(tl.maximum(tl.floor(value + 8.5), 0.0), 15.0).to(tl.int32)
    return code


@triton.jit
def _quantize(
    x, codes, scales, middles, n_blocks, per_row, width,
    KIND: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantise BLOCK blocks of E elements. A block is read as two halves, which 4-bit kinds pack into one byte."""
    HALF: tl.constexpr = E // 2
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_block = block < n_blocks
    row, start = block // per_row, (block % per_row) * E
    feature = start[:, None] + tl.arange(0, HALF)[None, :]
    place = x + row[:, None] * width + feature
    low = tl.load(place, mask=is_block[:, None] & (feature < width), other=0.0).to(tl.float32)
    is_high = is_block[:, None] & (feature + HALF < width)
    high = tl.load(place + HALF, mask=is_high, other=0.0).to(tl.float32)
    has_nan = (tl.max((low != low).to(tl.int32), 1) + tl.max((high != high).to(tl.int32), 1)) > 0
    low_abs = tl.where(low == low, tl.abs(low), 0.0)
    high_abs = tl.where(high == high, tl.abs(high), 0.0)
    largest = tl.maximum(tl.max(low_abs, 1), tl.max(high_abs, 1))
    if KIND == "nf4":
        stored = tl.where(has_nan, float("nan"), largest)
        scale = stored
    elif KIND == "q8_0":
        stored = tl.where(has_nan, float("nan"), tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32)))
        stored = stored.to(tl.float16)
        scale = stored.to(tl.float32)
    else:
        # The sign is that of the first element of this magnitude.
        at = tl.arange(0, HALF)[None, :]
        first_low = tl.min(tl.where(low_abs == largest[:, None], at, E), 1)
        first_high = tl.min(tl.where(high_abs == largest[:, None], at + HALF, E), 1)
        first = tl.minimum(first_low, first_high)[:, None]
        is_negative = tl.max(((at == first) & (low < 0)).to(tl.int32), 1)
        is_negative += tl.max(((at + HALF == first) & (high < 0)).to(tl.int32), 1)
        signed = tl.where(is_negative > 0, -largest, largest)
        stored = tl.where(has_nan, float("nan"), signed * -0.125).to(tl.float16)
        scale = stored.to(tl.float32)
    tl.store(scales + block, stored, mask=is_block)
    low_code, high_code = _code(low, scale, middles, KIND), _code(high, scale, middles, KIND)
    lane = tl.arange(0, HALF)[None, :]
    if KIND == "q8_0":
        target = codes + block[:, None] * E + lane
        tl.store(target, low_code.to(tl.int8), mask=is_block[:, None])
        tl.store(target + HALF, high_code.to(tl.int8), mask=is_block[:, None])
    else:
        packed = (low_code | (high_code << 4)).to(tl.uint8)
        tl.store(codes + block[:, None] * HALF + lane, packed, mask=is_block[:, None])


_launches = Launches(_quantize)


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantise the last axis; the codes and scales are those of the reference on a CPU, bit for bit."""
    form = BLOCKS[kind]
    width = x.shape[-1]
    shape = (*x.shape[:-1], -(-width // form.elements))
    codes = x.new_empty((*shape, form.code_width), dtype=form.code_dtype)
    scales = x.new_empty(shape, dtype=form.scale_dtype)
    n_blocks = scales.numel()
    if n_blocks:
        key = (kind, n_blocks, width, x.dtype, x.get_device())
        launch = _launches.get(key)
        if launch is None:
            grid, scalars = (-(-n_blocks // BLOCKS_PER_PROGRAM),), (n_blocks, shape[-1], width)
            launch = _launches.add(key, grid, scalars, kind, form.elements, BLOCKS_PER_PROGRAM)
        launch(x.contiguous(), codes, scales, _middles(x.device))
    return codes, scales


@functools.cache
def _middles(device: torch.device) -> Tensor:
    return nf4_middles().to(device)
