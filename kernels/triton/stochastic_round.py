"""Stochastic rounding of float32 to bfloat16, inside other kernels and of many tensors in one launch."""

from __future__ import annotations

from caramba.kernels.triton.launch import Launches
from caramba.kernels.triton.multi_tensor import BLOCK, WARPS, are_aligned, places_of, table_of
from caramba.kernels.triton.random_words import random_words
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def noise_of(seed, number, block, BLOCK_N: tl.constexpr):
    """16 random bits, uint32 [2048], of the elements of a block of a tensor, as caramba.ops.philox.halves defines them.

    Which half of which word an element has is chosen so that threads that load four neighbours hold all that they use.
    """
    tl.static_assert(BLOCK_N == 2048)
    place = block * (BLOCK_N // 8)  # the low halves of a block's counters do not wrap
    low = (place & 0xFFFFFFFF).to(tl.uint32) + tl.arange(0, BLOCK_N // 8).to(tl.uint32)
    zero = low * 0
    high, tensor = zero + (place >> 32).to(tl.uint32), zero + number.to(tl.uint32)
    w0, w1, w2, w3 = random_words(seed, low, high, tensor, zero)
    lower = tl.interleave(tl.interleave(w0 & 0xFFFF, w2 & 0xFFFF), tl.interleave(w1 & 0xFFFF, w3 & 0xFFFF))
    upper = tl.interleave(tl.interleave(w0 >> 16, w2 >> 16), tl.interleave(w1 >> 16, w3 >> 16))
    return tl.reshape(tl.permute(tl.join(lower, upper), (1, 0)), (BLOCK_N,))


@triton.jit
def rounded(x, noise):
    """float32 x in bfloat16: what is added to the lower half of its bits carries over as often as it should."""
    bits = x.to(tl.uint32, bitcast=True) + noise
    y = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where(x == x, y, x.to(tl.bfloat16))


@triton.jit
def _kernel(table_ptr, place_ptr, seed_ptr, ALIGNED: tl.constexpr, BLOCK_N: tl.constexpr):
    place = place_ptr + tl.program_id(0) * 2
    entry = table_ptr + tl.load(place) * 4
    block = tl.load(place + 1).to(tl.int64)
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptr = tl.load(entry).to(tl.pointer_type(tl.float32))
    out_ptr = tl.load(entry + 1).to(tl.pointer_type(tl.bfloat16))
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
        out_ptr = tl.multiple_of(out_ptr, 8)
    size = tl.load(entry + 2)
    noise = noise_of(tl.load(seed_ptr), tl.load(entry + 3), block, BLOCK_N)
    if ALIGNED and (block + 1) * BLOCK_N <= size:
        tl.store(out_ptr + at, rounded(tl.load(x_ptr + at), noise))
    else:
        mask = at < size
        tl.store(out_ptr + at, rounded(tl.load(x_ptr + at, mask=mask, other=0.0), noise), mask=mask)


_launches = Launches(_kernel)


def stochastic_round(xs: list[Tensor], outs: list[Tensor], seed: Tensor, first: int) -> None:
    rows = []
    for number, (x, out) in enumerate(zip(xs, outs, strict=True), first):
        if not (x.is_contiguous() and out.is_contiguous()):
            raise ValueError(f"stochastic_round: a tensor of shape {tuple(x.shape)} is not contiguous")
        if x.numel():
            rows.append((x.data_ptr(), out.data_ptr(), x.numel(), number))
    if not rows:
        return
    device = xs[0].device
    table, places = table_of(rows, device), places_of([row[2] for row in rows], device, BLOCK)
    is_aligned = are_aligned([address for row in rows for address in row[:2]])
    key = (len(places), is_aligned, table.get_device())
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.add(key, (len(places),), (), is_aligned, BLOCK, num_warps=WARPS)
    launch(table, places, seed)
