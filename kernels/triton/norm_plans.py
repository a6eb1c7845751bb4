"""What calls of the norms' launchers make and launch, and the kernel that adds up the sums of their programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from caramba.kernels.triton.launch import Launch, contiguous_strides, empty
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _add_up(sums_ptr, out_ptr, n_programs, width, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, n_programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        mask = (program < n_programs)[:, None] & (col < width)[None, :]
        total += tl.load(sums_ptr + program.to(tl.int64)[:, None] * width + col[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + col, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=col < width)


@triton.jit
def _sum_kernel(
    sums_ptr,
    out_ptr,
    other_sums_ptr,
    other_out_ptr,
    n_programs,
    width,
    ACC: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the programs' sums, [P, D] to [D], of one vector or two."""
    if tl.program_id(1) == 0:
        _add_up(sums_ptr, out_ptr, n_programs, width, ACC, BLOCK_P, BLOCK_N)
    elif other_sums_ptr is not None:
        _add_up(other_sums_ptr, other_out_ptr, n_programs, width, ACC, BLOCK_P, BLOCK_N)


def accumulator(x: Tensor) -> tuple[torch.dtype, tl.dtype]:
    return (torch.float64, tl.float64) if x.dtype == torch.float64 else (torch.float32, tl.float32)


@dataclass(frozen=True)
class Outputs:
    """Shapes and strides of an output like x, contiguous, and of one statistic per row with its dtype."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    row_strides: tuple[int, ...]
    dtype: torch.dtype

    def like_x(self, x: Tensor, stream: int | None) -> Tensor:
        """Make one of the shape of x; for `stream` see `launch.empty`."""
        return empty(x, stream, self.shape, self.strides, x.dtype)

    def of_rows(self, x: Tensor, stream: int | None) -> Tensor:
        """Make one of a number a row."""
        return empty(x, stream, self.shape[:-1], self.row_strides, self.dtype)


def outputs_of(x: Tensor) -> Outputs:
    """Return what is made of x."""
    shape = tuple(x.shape)
    return Outputs(shape, contiguous_strides(shape), contiguous_strides(shape[:-1]), accumulator(x)[0])


ForwardPlan = tuple[Outputs, Launch | None, bool]
"""What is made, the launch if there are any numbers, and whether all arguments are contiguous."""


@dataclass(frozen=True)
class BackwardPlan:
    """Outputs of a backward, its launch, and the launch that adds the sums of `programs` for its vectors.

    `vectors` are those of weight and bias that exist. Without a `launch` there are no rows.
    """

    outputs: Outputs
    vectors: tuple[bool, ...]
    programs: int
    launch: Launch | None
    totals: Launch | None
    is_even: bool

    def sums(self, x: Tensor, stream: int | None) -> list[Tensor | None]:
        """Make the programs' sums, [P, D] each, of the vectors that there are."""
        shape, dtype = (self.programs, self.outputs.shape[-1]), self.outputs.dtype
        return [empty(x, stream, shape, (shape[1], 1), dtype) if there else None for there in self.vectors]

    def add_up(
        self, sums: list[Tensor | None], x: Tensor, stream: int | None, dtypes: list[torch.dtype]
    ) -> list[Tensor]:
        """Return the gradients [D] of the vectors from their sums: zeros without rows, empty without a vector."""
        width = self.outputs.shape[-1]
        grads = [
            empty(x, stream, (width if there else 0,), (1,), dtype)
            for there, dtype in zip(self.vectors, dtypes, strict=True)
        ]
        if self.launch is None:
            return [grad.zero_() for grad in grads]
        if self.totals is not None:
            pairs = [pair for pair in zip(sums, grads, strict=True) if pair[0] is not None]
            self.totals(*pairs[0], *(pairs[1] if len(pairs) > 1 else (None, None)))
        return grads


def totals_of(programs: int, width: int, n_vectors: int, acc: tl.dtype) -> Launch | None:
    """Return the launch that adds the sums of one vector or two, [P, D] to [D]."""
    if not n_vectors:
        return None
    return Launch(_sum_kernel, (-(-width // 32), n_vectors), (programs, width, acc, 64, 32), {}, num_warps=4)
