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
    BLOCK: tl.constexpr,
):
    """One program per row: a pass for the log-sum-exp, kept per lane in base 2, and a pass that writes gradients.

    The second pass finds the row in the L2 cache where few programs run at a time, so blocks are large.
    """
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * row_stride
    lanes = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    counts = target != ignore_index
    is_inside = (target >= 0) & (target < n_classes)
    tl.device_assert(
        is_inside | (target == ignore_index), "cross_entropy_rows: target outside the vocabulary"
    )
    # Read before the reductions below, whose barriers stand between this and the pass that overwrites it.
    z_target = tl.load(place + tl.where(is_inside, target, 0)).to(tl.float32) * scale

    largest = tl.full([BLOCK], NOTHING, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n_classes, BLOCK):
        at = start + lanes
        z = tl.load(place + at, mask=at < n_classes, other=0.0, eviction_policy="evict_last").to(tl.float32)
        z = z * (scale * LOG2_E)
        z = tl.where(at < n_classes, z, NOTHING)
        step = z - largest
        # One of the two exponentials of the online softmax is always of 0.
        shrink = tl.exp2(-tl.abs(step))
        total = tl.where(step > 0, total * shrink + 1.0, total + shrink)
        largest = tl.where(step > 0, z, largest)
    top = tl.max(largest, axis=0)
    lse2 = top + tl.log2(tl.sum(total * tl.exp2(largest - top), axis=0))
    lse = lse2 * LN_2

    loss = lse - z_target + z_loss * lse * lse
    loss = tl.where(is_inside, loss, float("nan"))
    tl.store(losses + row, tl.where(counts, loss, 0.0))
    if WRITES:
        slope = tl.where(is_inside, scale * (1.0 + 2.0 * z_loss * lse), float("nan"))
        at_target = tl.where(counts, scale, 0.0)
        for start in range(0, n_classes, BLOCK):
            at = start + lanes
            z = tl.load(place + at, mask=at < n_classes, other=0.0, eviction_policy="evict_first").to(
                tl.float32
            )
            grad = tl.exp2(z * (scale * LOG2_E) - lse2) * slope
            grad = tl.where(counts, grad, 0.0)
            grad = tl.where(at == target, grad - at_target, grad)
            tl.store(place + at, grad.to(logits.dtype.element_ty), mask=at < n_classes)


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
        raise ValueError(
            "cross_entropy_rows: logits are float64, expected fp32, fp16 or bf16; the reference takes it"
        )
    if rows == 0:
        return
    block = min(8192, triton.next_power_of_2(n_classes))
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
            BLOCK=block,
            num_warps=min(32, max(1, block // 256)),
        )
