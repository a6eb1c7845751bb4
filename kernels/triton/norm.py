"""RMS and layer norm, with or without a residual: one program for a tile of whole rows."""

from __future__ import annotations

import functools

import torch
from caramba.kernels.triton.launch import Launch, stream_of
from caramba.kernels.triton.norm_plans import BackwardPlan, ForwardPlan, accumulator, outputs_of, totals_of
from caramba.kernels.triton.signature import LaunchCache
from torch import Tensor

import triton
import triton.language as tl

WIDEST = 65536
"""Elements of the longest row: a tile of rows is in registers."""
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


_forwards: LaunchCache[ForwardPlan] = LaunchCache()


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


_backwards: LaunchCache[BackwardPlan] = LaunchCache()


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
        _counts[device] = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
    return _counts[device]


def norm_forward(
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
    options = {"num_warps": warps}
    if centred and residual is None and block_n == 8192 and x.element_size() == 2:
        # With sixteen warps a multiprocessor has three rows, whose two sums after one another leave memory idle; with
        # eight it has four.
        options = {"num_warps": 8, "maxnreg": 64}
    launch = Launch(
        _forward_kernel,
        (-(-n_rows // block_m),),
        (n_rows, width, eps, centred, accumulator(x)[1], block_m, block_n),
        {},
        **options,
    )
    return outputs, launch, is_even


def norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; empty for a vector that is not there."""
    tensors = grad, grad_sum, x, mean, rstd, weight, bias
    given = [tensor for tensor in tensors if tensor is not None]
    rest = grad_sum is None, mean is None, weight is None, bias is None
    plan = _backwards.get(rest, given)
    if plan is None:
        is_even = all(tensor.is_contiguous() for tensor in given)
        plan = _backward_plan(x, mean is not None, (weight is not None, bias is not None), is_even)
        _backwards.add(rest, given, plan)
    if not plan.is_even:
        tensors = tuple(tensor if tensor is None else tensor.contiguous() for tensor in tensors)
        grad, grad_sum, x, mean, rstd, weight, bias = tensors  # pyright: ignore[reportAssignmentType]
    stream = stream_of(x)
    grad_x = plan.outputs.like_x(x, stream)
    dtypes = [plan.outputs.dtype if vector is None else vector.dtype for vector in (weight, bias)]
    if plan.launch is None:
        return grad_x, *plan.add_up([], x, stream, dtypes)  # pyright: ignore[reportReturnType]
    sums = plan.sums(x, stream)
    plan.launch(grad, grad_sum, x, mean, rstd, weight, bias, grad_x, *sums)
    return grad_x, *plan.add_up(sums, x, stream, dtypes)  # pyright: ignore[reportReturnType]


def _backward_plan(x: Tensor, centred: bool, vectors: tuple[bool, bool], is_even: bool) -> BackwardPlan:
    """Lay out calls of this form."""
    outputs = outputs_of(x)
    if not x.numel():
        return BackwardPlan(outputs, vectors, 0, None, None, is_even)
    width = x.shape[-1]
    acc = accumulator(x)[1]
    n_rows = x.numel() // width
    block_m, block_n, warps = tile(width)
    # A multiprocessor has registers for one centred program of a row of 8192, and for two that are not.
    held = min(max(PER_SM // block_n, 1 if centred else 2), 8)
    programs = min(-(-n_rows // block_m), multiprocessors(x.device) * held)
    launch = Launch(
        _backward_kernel,
        (programs,),
        (n_rows, width, centred, acc, block_m, block_n),
        {},
        # The sums of a row of 16384 need more registers.
        num_warps=min(2 * warps, 32) if block_n >= 16384 else warps,
    )
    totals = totals_of(programs, width, sum(vectors), acc)
    return BackwardPlan(outputs, vectors, programs, launch, totals, is_even)
