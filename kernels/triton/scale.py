"""A tensor times a number on the device, in place: nothing is read or written where the number is 1."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8
PROGRAMS = 4096
"""At most: programs that have nothing to do take time as well."""


@triton.jit
def _kernel(x_ptr, by_ptr, size, n_steps, ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    by = tl.load(by_ptr).to(ACC)
    if by != 1.0:
        step = tl.num_programs(0) * BLOCK_N
        at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        for _ in range(n_steps):
            x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(ACC)
            tl.store(x_ptr + at, (x * by).to(x_ptr.dtype.element_ty), mask=at < size)
            at += step


def scale_(x: Tensor, by: Tensor) -> None:
    if by.device != x.device or not x.is_contiguous():
        x.mul_(by.reshape(()))
        return
    size = x.numel()
    if size == 0:
        return
    blocks = triton.cdiv(size, BLOCK)
    programs = min(blocks, PROGRAMS)
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    with torch.cuda.device_of(x):
        _kernel[(programs,)](x, by, size, triton.cdiv(blocks, programs), acc, BLOCK, num_warps=WARPS)
