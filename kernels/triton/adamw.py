"""AdamW over many tensors in two launches: what is the same for all elements of a tensor, then the elements."""

from __future__ import annotations

import math

import torch
from caramba.kernels.triton.multi_tensor import BLOCK, TYPES, WARPS, are_aligned, places_of, table_of
from caramba.kernels.triton.stochastic_round import noise_of, rounded
from torch import Tensor

import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)
"""Of the table: parameter, first moment, second moment, gradient, weight, step, size, number for random rounding."""
COEFFICIENTS = tl.constexpr(4)
FIRST_BITS, SECOND_BITS = tl.constexpr(11), tl.constexpr(5)  # as caramba.ops.adamw has them
FIRST_HALF, SECOND_HALF, HALF = tl.constexpr(1 << 10), tl.constexpr(1 << 4), tl.constexpr(1 << 15)
ROWS = 128  # tensors of one program of the first launch


@triton.jit
def _adamw_count(
    table_ptr,
    out_ptr,
    rate_ptr,
    clip_ptr,
    scale_ptr,
    found_ptr,
    count,
    lr,
    log1,
    log2,
    weight_decay,
    sign,
    HAS_RATE: tl.constexpr,
    HAS_CLIP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Count the step of every tensor, and write decay, step size, 1 / sqrt(1 - beta2^t) and the gradient's factor."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < count
    step_ptr = tl.load(table_ptr + row * COLUMNS + 5, mask=mask, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr, mask=mask, other=0.0)
    if HAS_FOUND:
        step += tl.where(tl.load(found_ptr) == 0, 1.0, 0.0)
    else:
        step += 1.0
    tl.store(step_ptr, step, mask=mask)
    # In float64: float32 has lost half the digits of 1 - beta2^t at the first step. No step but one that is left out
    # is 0, and what is divided by zero then is not used.
    t = tl.maximum(step, 1.0).to(tl.float64)
    first = 1.0 - tl.exp(t * log1)
    second = 1.0 - tl.exp(t * log2)
    rate = tl.zeros([BLOCK_N], tl.float32)
    if HAS_RATE:
        rate += tl.load(rate_ptr)
    else:
        rate += lr
    factor = tl.zeros([BLOCK_N], tl.float32) + sign
    if HAS_CLIP:
        factor *= tl.load(clip_ptr)
    if HAS_SCALE:
        factor /= tl.load(scale_ptr)
    out = out_ptr + row * COEFFICIENTS
    tl.store(out, 1.0 - rate * weight_decay, mask=mask)
    tl.store(out + 1, (rate / first).to(tl.float32), mask=mask)
    tl.store(out + 2, (1.0 / tl.sqrt(second)).to(tl.float32), mask=mask)
    tl.store(out + 3, factor, mask=mask)


@triton.jit
def _adamw(p, m, v, g, decay, size, root, factor, rest1, rest2, eps):
    p, m, v, g = p.to(tl.float32), m.to(tl.float32), v.to(tl.float32), g.to(tl.float32) * factor
    m += (g - m) * rest1
    v += (g * g - v) * rest2
    return p * decay - size * m / (tl.sqrt(v) * root + eps), m, v


@triton.jit
def _held(p, seed, number, block, P: tl.constexpr, AT_RANDOM: tl.constexpr, BLOCK_N: tl.constexpr):
    """The parameter as it is stored; its noise is computed here, while what is loaded is waited for."""
    if AT_RANDOM:
        held = rounded(p, noise_of(seed, number, block, BLOCK_N))
    else:
        held = p.to(P)
    return held


@triton.jit
def _joined(p, m, v):
    """A bfloat16 parameter with the bits that its moments keep for it, in float32, and the moments without these."""
    m_bits, v_bits = m.to(tl.uint32, bitcast=True), v.to(tl.uint32, bitcast=True)
    m_kept, v_kept = (m_bits >> FIRST_BITS) << FIRST_BITS, (v_bits >> SECOND_BITS) << SECOND_BITS
    rest = ((m_bits - m_kept) << SECOND_BITS) + (v_bits - v_kept)
    # From half a unit on the parameter was rounded up, and the rest is below it.
    bits = p.to(tl.float32).to(tl.uint32, bitcast=True) + rest - ((rest >> 15) << 16)
    p = bits.to(tl.float32, bitcast=True)
    return p, m_kept.to(tl.float32, bitcast=True), v_kept.to(tl.float32, bitcast=True)


@triton.jit
def _nearest_bits(x, BITS: tl.constexpr, HALF_UNIT: tl.constexpr):
    """x to the nearest float32 whose last bits are zero, halves away from zero, as bits. NaN stays NaN."""
    bits = x.to(tl.uint32, bitcast=True)
    return (tl.where(x == x, bits + HALF_UNIT, bits) >> BITS) << BITS


@triton.jit
def _parted(p, m, v):
    """The nearest bfloat16 of a parameter, and the moments with the rest of it in their last bits."""
    bits = p.to(tl.uint32, bitcast=True)
    rest = bits & 0xFFFF
    held = (_nearest_bits(p, 16, HALF) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    held = tl.where(p == p, held, p.to(tl.bfloat16))
    m_bits = _nearest_bits(m, FIRST_BITS, FIRST_HALF) + (rest >> SECOND_BITS)
    v_bits = _nearest_bits(v, SECOND_BITS, SECOND_HALF) + (rest - ((rest >> SECOND_BITS) << SECOND_BITS))
    return held, m_bits.to(tl.float32, bitcast=True), v_bits.to(tl.float32, bitcast=True)


@triton.jit
def _adamw_step(
    table_ptr,
    place_ptr,
    coefficient_ptr,
    found_ptr,
    seed_ptr,
    rest1,
    rest2,
    eps,
    P: tl.constexpr,
    M: tl.constexpr,
    V: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_FOUND: tl.constexpr,
    AT_RANDOM: tl.constexpr,
    IN_MOMENTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    place = place_ptr + tl.program_id(0) * 2
    row = tl.load(place)
    block = tl.load(place + 1).to(tl.int64)
    entry = table_ptr + row * COLUMNS
    coefficient = coefficient_ptr + row * COEFFICIENTS
    decay, size = tl.load(coefficient), tl.load(coefficient + 1)
    root, factor = tl.load(coefficient + 2), tl.load(coefficient + 3)
    at = block * BLOCK_N + tl.arange(0, BLOCK_N)
    p_ptr = tl.load(entry).to(tl.pointer_type(P))
    m_ptr = tl.load(entry + 1).to(tl.pointer_type(M))
    v_ptr = tl.load(entry + 2).to(tl.pointer_type(V))
    g_ptr = tl.load(entry + 3).to(tl.pointer_type(G))
    w_ptr = tl.load(entry + 4).to(tl.pointer_type(W))
    if ALIGNED:
        # A thread takes as many elements of every tensor as 16 bytes hold of the widest: were it more of the narrow
        # ones, values would go through shared memory from the layout of loads to that of stores.
        p_ptr = tl.multiple_of(p_ptr, TOGETHER * P.primitive_bitwidth // 8)
        m_ptr = tl.multiple_of(m_ptr, TOGETHER * M.primitive_bitwidth // 8)
        v_ptr = tl.multiple_of(v_ptr, TOGETHER * V.primitive_bitwidth // 8)
        g_ptr = tl.multiple_of(g_ptr, TOGETHER * G.primitive_bitwidth // 8)
        w_ptr = tl.multiple_of(w_ptr, TOGETHER * W.primitive_bitwidth // 8)
    length = tl.load(entry + 6)
    if HAS_FOUND:  # no element is in a tensor that has none
        length = tl.where(tl.load(found_ptr) == 0, length, 0)
    seed, number = tl.load(seed_ptr), tl.load(entry + 7)
    if ALIGNED and (block + 1) * BLOCK_N <= length:
        p, m, v, g = tl.load(p_ptr + at), tl.load(m_ptr + at), tl.load(v_ptr + at), tl.load(g_ptr + at)
        if IN_MOMENTS:
            p, m, v = _joined(p, m, v)
        p, m, v = _adamw(p, m, v, g, decay, size, root, factor, rest1, rest2, eps)
        if IN_MOMENTS:
            held, m, v = _parted(p, m, v)
        else:
            held = _held(p, seed, number, block, P, AT_RANDOM, BLOCK_N)
        tl.store(p_ptr + at, held)
        tl.store(m_ptr + at, m.to(M))
        tl.store(v_ptr + at, v.to(V))
        if HAS_WEIGHT:
            tl.store(w_ptr + at, p.to(W))
    else:
        mask = at < length
        p, m = tl.load(p_ptr + at, mask=mask, other=0.0), tl.load(m_ptr + at, mask=mask, other=0.0)
        v, g = tl.load(v_ptr + at, mask=mask, other=0.0), tl.load(g_ptr + at, mask=mask, other=0.0)
        if IN_MOMENTS:
            p, m, v = _joined(p, m, v)
        p, m, v = _adamw(p, m, v, g, decay, size, root, factor, rest1, rest2, eps)
        if IN_MOMENTS:
            held, m, v = _parted(p, m, v)
        else:
            held = _held(p, seed, number, block, P, AT_RANDOM, BLOCK_N)
        tl.store(p_ptr + at, held, mask=mask)
        tl.store(m_ptr + at, m.to(M), mask=mask)
        tl.store(v_ptr + at, v.to(V), mask=mask)
        if HAS_WEIGHT:
            tl.store(w_ptr + at, p.to(W), mask=mask)


def adamw_step(
    parameters: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    grads: list[Tensor],
    weights: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    rate: Tensor | None,
    clip: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    seed: Tensor | None = None,
    first: int = 0,
    in_moments: bool = False,
) -> None:
    kinds: dict[tuple[torch.dtype | None, ...], list[tuple[int, ...]]] = {}
    for index, (p, m, v, step, g) in enumerate(zip(parameters, exp_avgs, exp_avg_sqs, steps, grads, strict=True)):
        w = weights[index] if weights else None
        if not (
            (p.is_contiguous() and m.is_contiguous() and v.is_contiguous() and g.is_contiguous())
            and (w is None or w.is_contiguous())
        ):
            raise ValueError(f"adamw_step: a tensor of shape {tuple(p.shape)} is not contiguous")
        dtypes = (p.dtype, m.dtype, v.dtype, g.dtype, None if w is None else w.dtype)
        places = (p.data_ptr(), m.data_ptr(), v.data_ptr(), g.data_ptr(), 0 if w is None else w.data_ptr())
        kinds.setdefault(dtypes, []).append((*places, step.data_ptr(), p.numel(), first + index))
    if any(torch.float64 in dtypes for dtypes in kinds):
        raise ValueError("adamw_step: the kernel computes in float32, and a tensor is float64")
    device = parameters[0].device
    logs = [math.log(beta) if beta > 0 else -math.inf for beta in (beta1, beta2)]
    with torch.cuda.device_of(parameters[0]):
        for dtypes, rows in kinds.items():
            table = table_of(rows, device)
            places = places_of([row[6] for row in rows], device, BLOCK)
            coefficients = torch.empty(len(rows), 4, dtype=torch.float32, device=device)
            given = (rate, clip, grad_scale, found_inf)
            # A pointer that is not read may point anywhere.
            pointers = [coefficients if x is None else x for x in given]
            _adamw_count[(-(-len(rows) // ROWS),)](
                *(table, coefficients, *pointers),
                *(len(rows), lr, *logs, weight_decay, -1.0 if maximize else 1.0),
                *(*(x is not None for x in given), ROWS),
            )
            if len(places):
                types = [TYPES[dtypes[0] if dtype is None else dtype] for dtype in dtypes]
                together = 16 // max(dtype.itemsize for dtype in dtypes if dtype is not None)
                is_aligned = are_aligned([address for row in rows for address in row[:5]])
                _adamw_step[(len(places),)](
                    *(table, places, coefficients, pointers[3], table if seed is None else seed),
                    *(1 - beta1, 1 - beta2, eps, *types, dtypes[4] is not None, found_inf is not None),
                    *(seed is not None, in_moments, is_aligned, together, BLOCK),
                    num_warps=WARPS,
                )
