"""Launcher of `caramba::cross_entropy_rows`: each row's loss, and its gradient in place of its logits."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Finite, so that the difference of two lanes that hold nothing is 0 and never NaN.
NOTHING = tl.constexpr(-1e38)
VECTOR = tl.constexpr(8)
"""Neighbours that a lane holds: 16 bytes of 16 bits."""
TILES = tl.constexpr(4)
"""Loads that a lane has in flight."""
LANES = 1024


@triton.jit
def _loaded(at_ptr, at, n_classes, MASKED: tl.constexpr, POLICY: tl.constexpr):
    if MASKED:
        x = tl.load(at_ptr, mask=at < n_classes, other=0.0, eviction_policy=POLICY)
    else:
        x = tl.load(at_ptr, eviction_policy=POLICY)
    return x


@triton.jit
def _base2(x, slope, at, n_classes, MASKED: tl.constexpr):
    z = x.to(tl.float32) * slope
    if MASKED:
        z = tl.where(at < n_classes, z, NOTHING)
    return z


@triton.jit
def _sums(row_ptr, at, n_classes, slope, largest, total, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """The largest z of every lane, and its sum of 2^(z - largest), after four more tiles."""
    x0 = _loaded(row_ptr + at, at, n_classes, MASKED, "evict_last")
    x1 = _loaded(row_ptr + at + SIZE, at + SIZE, n_classes, MASKED, "evict_last")
    x2 = _loaded(row_ptr + at + 2 * SIZE, at + 2 * SIZE, n_classes, MASKED, "evict_last")
    x3 = _loaded(row_ptr + at + 3 * SIZE, at + 3 * SIZE, n_classes, MASKED, "evict_last")
    z0 = _base2(x0, slope, at, n_classes, MASKED)
    z1 = _base2(x1, slope, at + SIZE, n_classes, MASKED)
    z2 = _base2(x2, slope, at + 2 * SIZE, n_classes, MASKED)
    z3 = _base2(x3, slope, at + 3 * SIZE, n_classes, MASKED)
    both = tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))
    top = tl.maximum(largest, tl.max(both, axis=1))
    under = top[:, None]
    powers = tl.exp2(z0 - under) + tl.exp2(z1 - under) + tl.exp2(z2 - under) + tl.exp2(z3 - under)
    return top, total * tl.exp2(largest - top) + tl.sum(powers, axis=1)


@triton.jit
def _gradient(x, slope, lse2, outer):
    return (tl.exp2(x.to(tl.float32) * slope - lse2) * outer).to(x.dtype)


@triton.jit
def _write(row_ptr, at, n_classes, slope, lse2, outer, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Four tiles of softmax times `outer`, in place of the logits."""
    x0 = _loaded(row_ptr + at, at, n_classes, MASKED, "evict_first")
    x1 = _loaded(row_ptr + at + SIZE, at + SIZE, n_classes, MASKED, "evict_first")
    x2 = _loaded(row_ptr + at + 2 * SIZE, at + 2 * SIZE, n_classes, MASKED, "evict_first")
    x3 = _loaded(row_ptr + at + 3 * SIZE, at + 3 * SIZE, n_classes, MASKED, "evict_first")
    if MASKED:
        tl.store(row_ptr + at, _gradient(x0, slope, lse2, outer), mask=at < n_classes)
        at += SIZE
        tl.store(row_ptr + at, _gradient(x1, slope, lse2, outer), mask=at < n_classes)
        at += SIZE
        tl.store(row_ptr + at, _gradient(x2, slope, lse2, outer), mask=at < n_classes)
        at += SIZE
        tl.store(row_ptr + at, _gradient(x3, slope, lse2, outer), mask=at < n_classes)
    else:
        tl.store(row_ptr + at, _gradient(x0, slope, lse2, outer))
        tl.store(row_ptr + at + SIZE, _gradient(x1, slope, lse2, outer))
        tl.store(row_ptr + at + 2 * SIZE, _gradient(x2, slope, lse2, outer))
        tl.store(row_ptr + at + 3 * SIZE, _gradient(x3, slope, lse2, outer))


@triton.jit
def cross_entropy_rows_kernel(
    logits,
    targets,
    losses,
    n_classes,
    row_stride,
    ignore_index,
    scale,
    z_loss,
    WRITES: tl.constexpr,
    N_LANES: tl.constexpr,
):
    """One program per row: a pass for the log-sum-exp, kept per lane in base 2, and a pass that writes gradients.

    The second pass finds the row in the L2 cache where few rows are in flight: one program of many warps fills a
    multiprocessor, with four loads per lane in flight. Only the last step of a pass looks where the row ends.
    """
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * row_stride
    size: tl.constexpr = N_LANES * VECTOR
    step: tl.constexpr = size * TILES
    at = tl.arange(0, N_LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    whole = n_classes // step * step
    target = tl.load(targets + row)
    is_inside = (target >= 0) & (target < n_classes)
    tl.device_assert(is_inside | (target == ignore_index), "cross_entropy_rows: target outside the vocabulary")
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if WRITES:
            nothing = tl.zeros([N_LANES, VECTOR], logits.dtype.element_ty)
            for start in range(0, n_classes, size):
                tl.store(place + start + at, nothing, mask=start + at < n_classes)
    else:
        # Read before the reductions below, whose barriers stand between this and the pass that overwrites it.
        at_target = place + tl.where(is_inside, target, 0)
        z_target = tl.load(at_target).to(tl.float32) * scale
        slope = scale * LOG2_E

        largest = tl.full([N_LANES], NOTHING, tl.float32)
        total = tl.zeros([N_LANES], tl.float32)
        for start in range(0, whole, step):
            largest, total = _sums(place, start + at, n_classes, slope, largest, total, size, False)
        if whole < n_classes:
            largest, total = _sums(place, whole + at, n_classes, slope, largest, total, size, True)
        top = tl.max(largest, axis=0)
        lse2 = top + tl.log2(tl.sum(total * tl.exp2(largest - top), axis=0))
        lse = lse2 * LN_2

        loss = lse - z_target + z_loss * lse * lse
        tl.store(losses + row, tl.where(is_inside, loss, float("nan")))
        if WRITES:
            outer = tl.where(is_inside, scale * (1.0 + 2.0 * z_loss * lse), float("nan"))
            for start in range(0, whole, step):
                _write(place, start + at, n_classes, slope, lse2, outer, size, False)
            if whole < n_classes:
                _write(place, whole + at, n_classes, slope, lse2, outer, size, True)
            # One store for the target, after those of the row, takes less than a comparison at every class.
            tl.debug_barrier()
            grad = tl.exp2(z_target * LOG2_E - lse2) * outer - scale
            tl.store(at_target, grad.to(logits.dtype.element_ty), mask=is_inside)


def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    ignore_index: int,
    scale: float,
    z_loss: float,
    writes: bool,
) -> None:
    """Launch one program per row."""
    rows, n_classes = logits.shape
    if logits.dtype == torch.float64:
        raise ValueError("cross_entropy_rows: logits are float64, expected fp32, fp16 or bf16; the reference takes it")
    if rows == 0:
        return
    lanes = min(LANES, triton.next_power_of_2(triton.cdiv(n_classes, VECTOR.value)))
    with torch.cuda.device_of(logits):
        cross_entropy_rows_kernel[(rows,)](
            logits,
            targets.contiguous(),
            losses,
            n_classes,
            logits.stride(0),
            ignore_index,
            scale,
            z_loss,
            WRITES=writes,
            N_LANES=lanes,
            num_warps=max(1, lanes // 32),
        )
