"""RMS and layer norm, with or without a residual: one program for a tile of whole rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from caramba.kernels.triton.forms import Plans, dtype_of
from caramba.kernels.triton.launch import Launch, Launches, contiguous_strides, empty, stream_of
from torch import Tensor

import triton
import triton.language as tl

WIDEST = 65536
"""Elements of the longest row: a tile of rows lies in registers."""
TILE, TILE_WARP = 2048, 512
"""Elements of a tile of short rows, and elements to a warp."""
PER_SM = 8192
"""Elements of the rows that backward programs of one multiprocessor hold sums for."""
_counts: dict[torch.device, int] = {}


# Counts change from prompt to prompt, and no load depends on what divides them: one kernel serves all.
@triton.jit(do_not_specialize=["n_rows"])
def _forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    sum_ptr,
    mean_ptr,
    rstd_ptr,
    n_rows,
    width,
    eps,
    CENTRED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    mask = (row < n_rows)[:, None] & (col < width)[None, :]
    at = row[:, None] * width + col[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC)
    if residual_ptr is not None:
        total = (x + tl.load(residual_ptr + at, mask=mask, other=0.0).to(ACC)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, total, mask=mask)
        x = total.to(ACC)
    if CENTRED:
        mean = tl.sum(x, axis=1) / width
        x = tl.where(mask, x - mean[:, None], 0.0)
        tl.store(mean_ptr + row, mean, mask=row < n_rows)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
    y = x * rstd[:, None]
    if weight_ptr is not None:
        y = y * tl.load(weight_ptr + col, mask=col < width, other=0.0).to(ACC)[None, :]
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + col, mask=col < width, other=0.0).to(ACC)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


ForwardPlan = tuple["Outputs", Launch | None, bool]
"""What is made, the launch if there are any numbers, and whether all arguments are contiguous."""
_forwards: Plans[ForwardPlan] = Plans()


@triton.jit
def _rows(ptr, start, n_rows, width, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Load a tile, of zeros outside."""
    row = start + tl.arange(0, BLOCK_M).to(tl.int64)
    col = tl.arange(0, BLOCK_N)
    mask = (row < n_rows)[:, None] & (col < width)[None, :]
    return tl.load(ptr + row[:, None] * width + col[None, :], mask=mask, other=0.0)


@triton.jit
def _backward_kernel(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    grad_x_ptr,
    weight_sums_ptr,
    bias_sums_ptr,
    n_rows,
    width,
    CENTRED: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every program takes tiles in turn and keeps its own sums of the gradients of weight and bias.

    A centred one asks for the next tile before it works on this one: its two sums of a row leave memory idle otherwise.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    in_width = col < width
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + col, mask=in_width, other=0.0).to(ACC)[None, :]
    weight_sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    bias_sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    stride = tl.num_programs(0) * BLOCK_M
    if CENTRED:
        next_x = _rows(x_ptr, program * BLOCK_M, n_rows, width, BLOCK_M, BLOCK_N)
        next_grad = _rows(grad_ptr, program * BLOCK_M, n_rows, width, BLOCK_M, BLOCK_N)
    for start in range(program * BLOCK_M, n_rows, stride):
        row = start + tl.arange(0, BLOCK_M).to(tl.int64)
        in_rows = row < n_rows
        mask = in_rows[:, None] & in_width[None, :]
        at = row[:, None] * width + col[None, :]
        if CENTRED:
            x, grad = next_x.to(ACC), next_grad.to(ACC)
            next_x = _rows(x_ptr, start + stride, n_rows, width, BLOCK_M, BLOCK_N)
            next_grad = _rows(grad_ptr, start + stride, n_rows, width, BLOCK_M, BLOCK_N)
        else:
            x = tl.load(x_ptr + at, mask=mask, other=0.0).to(ACC)
            grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(ACC)
        rstd = tl.load(rstd_ptr + row, mask=in_rows, other=0.0).to(ACC)[:, None]
        if CENTRED:
            x = x - tl.load(mean_ptr + row, mask=in_rows, other=0.0).to(ACC)[:, None]
        unit = tl.where(mask, x * rstd, 0.0)
        inner = grad
        if weight_ptr is not None:
            weight_sums += grad * unit
            inner = grad * weight
        if bias_ptr is not None:
            bias_sums += grad
        grad_x = inner - unit * (tl.sum(inner * unit, axis=1) / width)[:, None]
        if CENTRED:
            grad_x = grad_x - (tl.sum(inner, axis=1) / width)[:, None]
        grad_x = grad_x * rstd
        if grad_sum_ptr is not None:
            grad_x = grad_x + tl.load(grad_sum_ptr + at, mask=mask, other=0.0).to(ACC)
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=mask)
    out = program.to(tl.int64) * width + col
    if weight_ptr is not None:
        tl.store(weight_sums_ptr + out, tl.sum(weight_sums, axis=0), mask=in_width)
    if bias_ptr is not None:
        tl.store(bias_sums_ptr + out, tl.sum(bias_sums, axis=0), mask=in_width)


_backwards = Launches(_backward_kernel)


@triton.jit
def _add_up(
    sums_ptr, out_ptr, n_programs, width, ACC: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_P, BLOCK_N], ACC)
    for start in range(0, n_programs, BLOCK_P):
        program = start + tl.arange(0, BLOCK_P)
        mask = (program < n_programs)[:, None] & (col < width)[None, :]
        total += tl.load(
            sums_ptr + program.to(tl.int64)[:, None] * width + col[None, :], mask=mask, other=0.0
        )
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


_totals = Launches(_sum_kernel)


def vector_grads(x: Tensor, vectors: tuple[Tensor | None, ...], dtype: torch.dtype) -> list[Tensor]:
    """Where the gradients of vectors [D] go: zeros if x has no rows, and empty for a vector that is not there."""
    return [
        x.new_empty(0, dtype=dtype)
        if vector is None
        else torch.zeros_like(vector)
        if x.numel() == 0
        else torch.empty_like(vector)
        for vector in vectors
    ]


def sum_programs(sums: list[Tensor | None], outs: list[Tensor]) -> None:
    """Add the sums [P, D] that there are to their `outs` [D]."""
    there = [pair for partial, out in zip(sums, outs, strict=True) if (pair := (partial, out))[0] is not None]
    if not there:
        return
    partial, out = there[0]
    assert partial is not None
    other, other_out = there[1] if len(there) > 1 else (None, None)
    programs, width = partial.shape
    key = (programs, width, out.dtype, dtype_of(other_out), partial.dtype, partial.get_device())
    launch = _totals.get(key)
    if launch is None:
        acc = tl.float64 if partial.dtype == torch.float64 else tl.float32
        grid = (-(-width // 32), len(there))
        launch = _totals.add(key, grid, (programs, width), *(acc, 64, 32), num_warps=4)
    launch(partial, out, other, other_out)


@functools.cache
def tile(width: int) -> tuple[int, int, int]:
    """Rows and columns of a tile, and its warps."""
    if width > WIDEST:
        raise ValueError(f"norm: rows of {width} elements, expected at most {WIDEST}; use kernels: reference")
    block_n = max(16, 1 << (width - 1).bit_length())
    block_m = max(1, TILE // block_n)
    return block_m, block_n, min(max(block_m * block_n // TILE_WARP, 1), 16)


def multiprocessors(device: torch.device) -> int:
    if device not in _counts:
        _counts[device] = (
            torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        )
    return _counts[device]


def accumulator(x: Tensor) -> tuple[torch.dtype, tl.dtype]:
    return (torch.float64, tl.float64) if x.dtype == torch.float64 else (torch.float32, tl.float32)


@dataclass(frozen=True)
class Outputs:
    """Shapes and strides of what is as x, contiguous, and of a number for each of its rows, with that one's dtype."""

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


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return y, the sum, the mean and the reciprocal root, those that there are."""
    given = [tensor for tensor in (x, residual, weight, bias) if tensor is not None]
    rest = eps, centred, residual is None, weight is None, bias is None
    plan = _forwards.get(rest, given)
    if plan is None:
        plan = _forward_plan(x, residual, weight, bias, eps, centred)
        _forwards.add(rest, given, plan)
    outputs, launch, is_even = plan
    if not is_even:
        x, residual, weight, bias = (
            tensor if tensor is None else tensor.contiguous() for tensor in (x, residual, weight, bias)
        )  # pyright: ignore[reportAssignmentType]
    stream = stream_of(x)
    y, rstd = outputs.like_x(x, stream), outputs.of_rows(x, stream)
    total = None if residual is None else outputs.like_x(x, stream)
    mean = outputs.of_rows(x, stream) if centred else None
    if launch is None:
        # What the mean of nothing is, as the reference has it.
        rstd.fill_(float("nan"))
        return y, total, mean if mean is None else mean.fill_(float("nan")), rstd
    launch(x, residual, weight, bias, y, total, mean, rstd)
    return y, total, mean, rstd


def _forward_plan(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> ForwardPlan:
    """Lay out calls of this form."""
    outputs = outputs_of(x)
    is_even = all(tensor is None or tensor.is_contiguous() for tensor in (x, residual, weight, bias))
    if not x.numel():
        return outputs, None, is_even
    width = x.shape[-1]
    n_rows = x.numel() // width
    block_m, block_n, warps = tile(width)
    launch = Launch(
        _forward_kernel,
        (-(-n_rows // block_m),),
        (n_rows, width, eps, centred, accumulator(x)[1], block_m, block_n),
        {},
        num_warps=warps,
    )
    return outputs, launch, is_even


def _backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; empty for a vector that is not there."""
    grad, x = grad.contiguous(), x.contiguous()
    grad_sum = grad_sum if grad_sum is None else grad_sum.contiguous()
    width = x.shape[-1]
    dtype, acc = accumulator(x)
    grad_x = torch.empty_like(x)
    grads = vector_grads(x, (weight, bias), dtype)
    if x.numel() == 0:
        return grad_x, grads[0], grads[1]
    n_rows = x.numel() // width
    block_m, block_n, warps = tile(width)
    # A multiprocessor has registers for one centred program of a row of 8192, and for two that are not.
    held = min(max(PER_SM // block_n, 2 if mean is None else 1), 8)
    programs = min(-(-n_rows // block_m), multiprocessors(x.device) * held)
    sums = [
        None if vector is None else x.new_empty((programs, width), dtype=dtype) for vector in (weight, bias)
    ]
    weight = weight if weight is None else weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    dtypes = (grad.dtype, dtype_of(grad_sum), x.dtype, dtype_of(weight), dtype_of(bias))
    key = (n_rows, width, mean is None, x.get_device(), dtypes)
    launch = _backwards.get(key)
    if launch is None:
        launch = _backwards.add(
            *(key, (programs,), (n_rows, width)),
            *(mean is not None, acc, block_m, block_n),
            # The sums of a row of 16384 need more registers.
            num_warps=min(2 * warps, 32) if block_n >= 16384 else warps,
        )
    launch(grad, grad_sum, x, mean, rstd.contiguous(), weight, bias, grad_x, sums[0], sums[1])
    sum_programs(sums, grads)
    return grad_x, grads[0], grads[1]


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, _, _, rstd = _forward(x, None, weight, None, eps, False)
    return y, rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    y, total, _, rstd = _forward(x, residual, weight, None, eps, False)
    return y, total, rstd


def rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _backward(grad, grad_sum, x, None, rstd, weight, None)[:2]


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    y, _, mean, rstd = _forward(x, None, weight, bias, eps, True)
    return y, mean, rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    return _forward(x, residual, weight, bias, eps, True)


def layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(grad, grad_sum, x, mean.contiguous(), rstd, weight, bias)
