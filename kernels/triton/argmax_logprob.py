"""Kernels and launcher of `caramba::argmax_logprob`: parts of a row each give their best, and a program joins them."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

BLOCK, MOST_PARTS = 1024, 1024


@triton.jit
def _best(x, at, inside, LAST):
    """Return the greatest of x, where it is first, and the sum of exp(x - it)."""
    best = tl.max(tl.where(inside, x, float("-inf")), axis=0)
    first = tl.min(tl.where(inside & (x == best), at, LAST), axis=0)  # of NaN none is equal
    return best, first


@triton.jit
def _parts_kernel(logits_ptr, best_ptr, sum_ptr, first_ptr, stride, width, n_parts, BLOCK_V: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = at < width
    x = tl.load(logits_ptr + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    best, first = _best(x, at, inside, width - 1)
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.where(inside, tl.exp(x - shift), 0.0), axis=0)
    out = row * n_parts + part
    tl.store(best_ptr + out, best)
    tl.store(sum_ptr + out, total)
    tl.store(first_ptr + out, first)


@triton.jit
def _join_kernel(best_ptr, sum_ptr, first_ptr, index_ptr, logprob_ptr, n_parts, width, BLOCK_P: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    inside = part < n_parts
    at = row * n_parts + part
    bests = tl.load(best_ptr + at, mask=inside, other=float("-inf"))
    firsts = tl.load(first_ptr + at, mask=inside, other=0)
    best, first = _best(bests, firsts, inside, width - 1)
    shift = tl.where(best == float("-inf"), 0.0, best)
    sums = tl.load(sum_ptr + at, mask=inside, other=0.0)
    # A part of -inf alone counts nothing, and one with NaN makes the whole NaN.
    scale = tl.where(bests == float("-inf"), 1.0, tl.exp(bests - shift))
    total = tl.sum(tl.where(inside, sums * scale, 0.0), axis=0)
    tl.store(index_ptr + row, first.to(tl.int64))
    tl.store(logprob_ptr + row, best - shift - tl.log(total))


_parts, _joins = Launches(_parts_kernel), Launches(_join_kernel)


def argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64:
        raise ValueError("argmax_logprob: got torch.float64, expected logits of 16 or 32 bits on a GPU")
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    n_rows, width = logits.shape
    index = logits.new_empty(n_rows, dtype=torch.int64)
    logprob = logits.new_empty(n_rows, dtype=torch.float32)
    if not n_rows:
        return index, logprob
    block, n_parts = parts_of(width)
    best, total = (logits.new_empty((n_rows, n_parts), dtype=torch.float32) for _ in range(2))
    first = logits.new_empty((n_rows, n_parts), dtype=torch.int32)
    key = (n_rows, width, logits.stride(0), logits.dtype, logits.get_device())
    launch, join = _parts.get(key), _joins.get(key)
    if launch is None or join is None:
        scalars = (logits.stride(0), width, n_parts)
        launch = _parts.add(key, (n_rows, n_parts), scalars, block, num_warps=4)
        block_p = max(16, 1 << (n_parts - 1).bit_length())
        join = _joins.add(key, (n_rows,), (n_parts, width), block_p, num_warps=1 if block_p <= 256 else 4)
    launch(logits, best, total, first)
    join(best, total, first, index, logprob)
    return index, logprob


def parts_of(width: int) -> tuple[int, int]:
    """Return the numbers of a part of a row, and how many parts there are."""
    block = max(BLOCK, 1 << (-(-width // MOST_PARTS) - 1).bit_length())
    return block, -(-width // block)
