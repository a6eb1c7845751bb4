"""Launcher of `caramba::distillation_rows`: KL and cross-entropy of each row, and the gradient over its logits."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Finite, so that a block without entries gives 0 and never NaN.
LOWEST = tl.constexpr(-1e38)
BLOCK = 4096


@triton.jit
def _rescale(total, top, block_top):
    """Return the new maximum and `total` relative to it."""
    largest = tl.maximum(top, block_top)
    return largest, total * tl.exp2(top - largest)


@triton.jit
def distillation_rows_kernel(
    logits,
    teacher,
    targets,
    kl,
    ce,
    n_classes,
    row_stride,
    teacher_stride,
    ignore_index,
    inverse_temperature,
    temperature,
    kl_weight,
    WRITES: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_CE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program a row: a pass of online softmax sums in base 2, and a pass that writes the gradient."""
    row = tl.program_id(0).to(tl.int64)
    student_row, teacher_row = logits + row * row_stride, teacher + row * teacher_stride
    target = tl.load(targets + row)
    columns = tl.arange(0, BLOCK_V)
    if target == ignore_index:
        tl.store(kl + row, 0.0)
        tl.store(ce + row, 0.0)
        if WRITES:
            for start in range(0, n_classes, BLOCK_V):
                at = start + columns
                tl.store(student_row + at, tl.zeros([BLOCK_V], logits.dtype.element_ty), mask=at < n_classes)
    else:
        slope = inverse_temperature * LOG2_E
        # Read before the pass that overwrites it.
        z_target = tl.load(student_row + target).to(tl.float32)
        top_q = LOWEST + 0.0
        top_p = LOWEST + 0.0
        top_z = LOWEST + 0.0
        sum_q = 0.0
        sum_p = 0.0
        sum_z = 0.0
        gap = 0.0  # sum of 2^(v - top_p) (v - u)
        for start in range(0, n_classes, BLOCK_V):
            at = start + columns
            mask = at < n_classes
            z = tl.load(student_row + at, mask=mask, other=0.0).to(tl.float32)
            y = tl.load(teacher_row + at, mask=mask, other=0.0).to(tl.float32)
            u = tl.where(mask, z * slope, LOWEST)
            v = tl.where(mask, y * slope, LOWEST)
            top_q, sum_q = _rescale(sum_q, top_q, tl.max(u, axis=0))
            sum_q += tl.sum(tl.exp2(u - top_q), axis=0)
            new_top, sum_p = _rescale(sum_p, top_p, tl.max(v, axis=0))
            gap *= tl.exp2(top_p - new_top)
            top_p = new_top
            weight = tl.exp2(v - top_p)
            sum_p += tl.sum(weight, axis=0)
            gap += tl.sum(weight * (v - u), axis=0)
            if HAS_TEMPERATURE:
                x = tl.where(mask, z * LOG2_E, LOWEST)
                top_z, sum_z = _rescale(sum_z, top_z, tl.max(x, axis=0))
                sum_z += tl.sum(tl.exp2(x - top_z), axis=0)
        lse_q = top_q + tl.log2(sum_q)
        lse_p = top_p + tl.log2(sum_p)
        lse_z = lse_q
        if HAS_TEMPERATURE:
            lse_z = top_z + tl.log2(sum_z)
        tl.store(kl + row, (gap / sum_p - lse_p + lse_q) * LN_2 * temperature * temperature)
        tl.store(ce + row, lse_z * LN_2 - z_target)
        if WRITES:
            of_kl = kl_weight * temperature
            of_ce = 1.0 - kl_weight
            tl.debug_barrier()
            for start in range(0, n_classes, BLOCK_V):
                at = start + columns
                mask = at < n_classes
                z = tl.load(student_row + at, mask=mask, other=0.0).to(tl.float32)
                y = tl.load(teacher_row + at, mask=mask, other=0.0).to(tl.float32)
                grad = (tl.exp2(z * slope - lse_q) - tl.exp2(y * slope - lse_p)) * of_kl
                if HAS_CE:
                    hit = tl.where(at == target, 1.0, 0.0)
                    grad += (tl.exp2(z * LOG2_E - lse_z) - hit) * of_ce
                tl.store(student_row + at, grad.to(logits.dtype.element_ty), mask=mask)


def distillation_rows(
    logits: Tensor,
    teacher: Tensor,
    targets: Tensor,
    kl: Tensor,
    ce: Tensor,
    ignore_index: int,
    temperature: float,
    kl_weight: float,
    writes: bool,
) -> None:
    """Launch one program a row."""
    rows, n_classes = logits.shape
    if logits.dtype == torch.float64:
        raise ValueError("distillation_rows: got float64 logits, expected fp32, fp16 or bf16; use the reference")
    if rows == 0:
        return
    block = min(BLOCK, max(16, triton.next_power_of_2(n_classes)))
    with torch.cuda.device_of(logits):
        distillation_rows_kernel[(rows,)](
            logits,
            teacher,
            targets.contiguous(),
            kl,
            ce,
            n_classes,
            logits.stride(0),
            teacher.stride(0),
            ignore_index,
            1.0 / temperature,
            temperature,
            kl_weight,
            WRITES=writes,
            HAS_TEMPERATURE=temperature != 1.0,
            HAS_CE=kl_weight < 1.0,
            BLOCK_V=block,
            num_warps=min(8, max(1, block // 512)),
        )
