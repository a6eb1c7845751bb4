"""Kernels and launcher of `sample`: parts of a row give their sums, then a program finds the part, and the token in it,
at the number."""

from __future__ import annotations

import torch
from caramba.kernels.triton.argmax_logprob import parts_of
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _weights(x, best, temperature, inside):
    """Return exp((x - best) / temperature) in float64, 0 where there is nothing, and for greedy rows exp(x - best)."""
    scale = tl.where(temperature == 0, temperature + 1, temperature)
    away = (x.to(tl.float64) - best.to(tl.float64)) / scale
    return tl.where(inside & (x > float("-inf")), tl.exp(away), tl.zeros_like(away))


@triton.jit
def _parts_kernel(
    logits_ptr,
    temperature_ptr,
    best_ptr,
    first_ptr,
    sum_ptr,
    weight_ptr,
    stride,
    apart,
    width,
    n_parts,
    BLOCK_V: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = at < width
    x = tl.load(logits_ptr + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    best = tl.max(x, axis=0)
    first = tl.min(tl.where(inside & (x == best), at, width - 1), axis=0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    total = tl.sum(tl.where(inside, tl.exp(x - shift), 0.0), axis=0)
    weight = tl.sum(_weights(x, shift, tl.load(temperature_ptr + row * apart), inside), axis=0)
    out = row * n_parts + part
    tl.store(best_ptr + out, best)
    tl.store(first_ptr + out, first)
    tl.store(sum_ptr + out, total)
    tl.store(weight_ptr + out, weight)


@triton.jit
def _join_kernel(
    logits_ptr,
    temperature_ptr,
    uniform_ptr,
    best_ptr,
    first_ptr,
    sum_ptr,
    weight_ptr,
    token_ptr,
    logprob_ptr,
    stride,
    apart,
    width,
    n_parts,
    BLOCK_V: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row * apart)
    part = tl.arange(0, BLOCK_P)
    is_part = part < n_parts
    at = row * n_parts + part
    bests = tl.load(best_ptr + at, mask=is_part, other=float("-inf"))
    best = tl.max(bests, axis=0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    firsts = tl.load(first_ptr + at, mask=is_part, other=0)
    first = tl.min(tl.where(is_part & (bests == best), firsts, width - 1), axis=0)
    # A part of -inf alone counts nothing, and one with NaN makes the log-probability NaN.
    sums = tl.load(sum_ptr + at, mask=is_part, other=0.0)
    share = tl.where(bests == float("-inf"), 1.0, tl.exp(bests - shift))
    total = tl.sum(tl.where(is_part, sums * share, 0.0), axis=0)
    # The part whose share of the weights holds the number: each part's are in units of its own greatest.
    units = _weights(bests, shift, temperature, is_part)
    weights = tl.load(weight_ptr + at, mask=is_part, other=0.0) * units
    ends = tl.cumsum(weights, axis=0)
    point = tl.load(uniform_ptr + row) * tl.max(ends, axis=0)
    # It can round up to the end of the last share: it is then in that one.
    held = tl.min(tl.where(ends <= point, BLOCK_P, part), axis=0)
    held = tl.maximum(tl.minimum(held, tl.max(tl.where(weights > 0, part, 0), axis=0)), 0)
    begin = tl.max(tl.where(part < held, ends, tl.zeros_like(ends)), axis=0)
    is_held = part == held
    unit = tl.sum(tl.where(is_held, units, tl.zeros_like(units)), axis=0)
    top = tl.sum(tl.where(is_held, tl.where(bests == float("-inf"), 0.0, bests), 0.0), axis=0)
    # The token in it.
    inner = tl.arange(0, BLOCK_V)
    inside = held * BLOCK_V + inner < width
    x = tl.load(logits_ptr + row * stride + held * BLOCK_V + inner, mask=inside, other=float("-inf")).to(tl.float32)
    inner_weights = _weights(x, top, temperature, inside)
    rest = (point - begin) / unit
    found = tl.min(tl.where(tl.cumsum(inner_weights, axis=0) <= rest, BLOCK_V, inner), axis=0)
    found = tl.minimum(found, tl.max(tl.where(inner_weights > 0, inner, 0), axis=0))
    token = tl.where(temperature == 0, first, tl.minimum(held * BLOCK_V + found, width - 1))
    tl.store(token_ptr + row, token.to(tl.int64))
    chosen = tl.load(logits_ptr + row * stride + token).to(tl.float32)
    tl.store(logprob_ptr + row, chosen - shift - tl.log(total))


_parts, _joins = Launches(_parts_kernel), Launches(_join_kernel)


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dtype == torch.float64 or temperature.dtype != torch.float64 or uniform.dtype != torch.float64:
        raise ValueError(
            f"sample: got {logits.dtype}, {temperature.dtype} and {uniform.dtype}, expected logits of 16 or 32 bits and "
            "settings of 64 on a GPU"
        )
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    uniform = uniform.contiguous()
    n_rows, width = logits.shape
    token = logits.new_empty(n_rows, dtype=torch.int64)
    logprob = logits.new_empty(n_rows, dtype=torch.float32)
    if not n_rows:
        return token, logprob
    block, n_parts = parts_of(width)
    best, total = (logits.new_empty((n_rows, n_parts), dtype=torch.float32) for _ in range(2))
    first = logits.new_empty((n_rows, n_parts), dtype=torch.int32)
    weight = logits.new_empty((n_rows, n_parts), dtype=torch.float64)
    apart = temperature.stride(0)  # of a table of settings it is a column
    key = (n_rows, width, logits.stride(0), apart, logits.dtype, logits.get_device())
    launch, join = _parts.get(key), _joins.get(key)
    if launch is None or join is None:
        scalars = (logits.stride(0), apart, width, n_parts)
        launch = _parts.add(key, (n_rows, n_parts), scalars, block, num_warps=4)
        block_p = max(16, 1 << (n_parts - 1).bit_length())
        join = _joins.add(key, (n_rows,), scalars, block, block_p, num_warps=4)
    launch(logits, temperature, best, first, total, weight)
    join(logits, temperature, uniform, best, first, total, weight, token, logprob)
    return token, logprob
