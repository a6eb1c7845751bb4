"""Layer norm, dropout and an activation: programs take tiles of rows in turn, and keep weight and bias in registers."""

from __future__ import annotations

from typing import Any

import torch
from caramba.kernels.triton.activation import activated, drawn_words, kept, kept_bits, slope
from caramba.kernels.triton.launch import Launch, arch, stream_of
from caramba.kernels.triton.norm import multiprocessors, tile
from caramba.kernels.triton.norm_plans import BackwardPlan, ForwardPlan, accumulator, outputs_of, totals_of
from caramba.kernels.triton.persistent_rows import (
    as_numbers,
    load_known,
    load_of_rows,
    load_rows,
    places,
    rounded,
    store_known,
    two_sums,
)
from caramba.kernels.triton.signature import LaunchCache
from torch import Tensor

import triton
import triton.language as tl

ACTIVATIONS = {"relu": 1, "gelu": 2, "silu": 3}
THREADS_FORWARD, THREADS_BACKWARD = (640, 512), (512, 256)
"""Threads of a multiprocessor that programs occupy, of 16 bits and of more: registers that a tile and the next take."""
THREADS_OF_TWO = 512
"""The same of forward programs that take two wide rows at a time, whose warps wait for each other half as often."""
AHEAD_BYTES = 16384
"""Of a row up to which registers hold a tile and the next."""
REGISTERS = 65536
"""Of a multiprocessor. Programs stay, so that one more than there is place for would take as long as all others."""


@triton.jit(do_not_specialize=["bound", "seed"])
def _forward_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    mean_ptr,
    rstd_ptr,
    seed: tl.int64,
    n_rows,
    width,
    eps,
    keep_scale,
    bound,
    DROPOUT: tl.constexpr,
    DROPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    IN_WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """EXACT: rows fill their tile, and tiles the rows. The scale of dropout is in weight and bias, once a program.
    IN_WORDS: random numbers and the output are computed two to a word.

    AHEAD, a program asks for its next tile before it works on this one: two sums of a row leave memory idle otherwise.
    """
    col = tl.arange(0, BLOCK_N)
    in_width = col < width
    if weight_ptr is not None:
        weight = load_known(weight_ptr + col, in_width, EXACT).to(ACC)[None, :] * keep_scale
    if bias_ptr is not None:
        bias = load_known(bias_ptr + col, in_width, EXACT).to(ACC)[None, :] * keep_scale
    first, stride = tl.program_id(0) * BLOCK_M, tl.num_programs(0) * BLOCK_M
    WIDTH = BLOCK_N if EXACT else width
    share = tl.full([], 1.0, ACC) / WIDTH  # a division takes ten times as long as a product, in every row
    if AHEAD:
        next_x = load_rows(x_ptr, first, n_rows, width, BLOCK_M, BLOCK_N, EXACT)
    for start in range(first, n_rows, stride):
        row = start + tl.arange(0, BLOCK_M).to(tl.int64)
        mask = (row < n_rows)[:, None] & in_width[None, :]
        at = places(start, width, BLOCK_M, BLOCK_N, EXACT)
        if AHEAD:
            x = as_numbers(next_x, ACC)
            next_x = load_rows(x_ptr, start + stride, n_rows, width, BLOCK_M, BLOCK_N, EXACT)
        else:
            x = load_known(x_ptr + at, mask, EXACT).to(ACC)
        mean = tl.sum(x, axis=1) * share
        x = x - mean[:, None]
        if not EXACT:
            x = tl.where(mask, x, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=1) * share + eps)
        y = x * rstd[:, None]
        store_known(mean_ptr + row, mean, row < n_rows, EXACT)
        store_known(rstd_ptr + row, rstd, row < n_rows, EXACT)
        y = y * weight if weight_ptr is not None else y * keep_scale
        if bias_ptr is not None:
            y = y + bias
        if DROPOUT:
            words = drawn_words(row, seed, BLOCK_M, BLOCK_N)
            if not IN_WORDS:
                y = tl.where(kept(words, bound, DROPS), y, 0.0)
        y = activated(y, ACTIVATION, y_ptr.dtype.element_ty)
        if IN_WORDS:
            # Every activation of what is dropped is 0.
            held = rounded(y, BLOCK_M, BLOCK_N) & kept_bits(words, bound, DROPS)
            pair = tl.arange(0, BLOCK_M)[:, None] * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[None, :]
            at_words = tl.full([], start, tl.int64) * (BLOCK_N // 2) + pair
            tl.store(y_ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + at_words, held)
        else:
            store_known(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask, EXACT)


@triton.jit(do_not_specialize=["bound", "seed"])
def _backward_kernel(
    grad_ptr,
    x_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    bias_ptr,
    grad_x_ptr,
    weight_sums_ptr,
    bias_sums_ptr,
    seed: tl.int64,
    n_rows,
    width,
    keep_scale,
    bound,
    DROPOUT: tl.constexpr,
    DROPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ACC: tl.constexpr,
    EXACT: tl.constexpr,
    IN_WORDS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Every program keeps its own sums of the gradients of weight and bias, of which the scale of dropout is taken once.

    AHEAD, it asks for its next tile before it works on this one.
    """
    program = tl.program_id(0)
    col = tl.arange(0, BLOCK_N)
    in_width = col < width
    if weight_ptr is not None:
        weight = load_known(weight_ptr + col, in_width, EXACT).to(ACC)[None, :] * keep_scale
    if bias_ptr is not None:
        bias = load_known(bias_ptr + col, in_width, EXACT).to(ACC)[None, :] * keep_scale
    weight_sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    bias_sums = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    stride = tl.num_programs(0) * BLOCK_M
    share = tl.full([], 1.0, ACC) / width
    if AHEAD:
        next_rstd = load_of_rows(rstd_ptr, program * BLOCK_M, n_rows, BLOCK_M)
        next_mean = load_of_rows(mean_ptr, program * BLOCK_M, n_rows, BLOCK_M)
        next_x = load_rows(x_ptr, program * BLOCK_M, n_rows, width, BLOCK_M, BLOCK_N, EXACT)
        next_grad = load_rows(grad_ptr, program * BLOCK_M, n_rows, width, BLOCK_M, BLOCK_N, EXACT)
    for start in range(program * BLOCK_M, n_rows, stride):
        row = start + tl.arange(0, BLOCK_M).to(tl.int64)
        in_rows = row < n_rows
        mask = in_rows[:, None] & in_width[None, :]
        at = places(start, width, BLOCK_M, BLOCK_N, EXACT)
        if DROPOUT:
            words = drawn_words(row, seed, BLOCK_M, BLOCK_N)
        if AHEAD:
            if IN_WORDS:
                next_grad &= kept_bits(words, bound, DROPS)
            x, grad, rstd, mean = as_numbers(next_x, ACC), as_numbers(next_grad, ACC), next_rstd, next_mean
            next_rstd = load_of_rows(rstd_ptr, start + stride, n_rows, BLOCK_M)
            next_mean = load_of_rows(mean_ptr, start + stride, n_rows, BLOCK_M)
            next_x = load_rows(x_ptr, start + stride, n_rows, width, BLOCK_M, BLOCK_N, EXACT)
            next_grad = load_rows(grad_ptr, start + stride, n_rows, width, BLOCK_M, BLOCK_N, EXACT)
        else:
            x = load_known(x_ptr + at, mask, EXACT).to(ACC)
            grad = load_known(grad_ptr + at, mask, EXACT).to(ACC)
            rstd = load_of_rows(rstd_ptr, start, n_rows, BLOCK_M)
            mean = load_of_rows(mean_ptr, start, n_rows, BLOCK_M)
        rstd, mean = rstd.to(ACC)[:, None], mean.to(ACC)[:, None]
        unit = x * rstd - mean * rstd  # one instruction, and rounded no worse than a mean is
        if not EXACT:
            unit = tl.where(mask, unit, 0.0)
        before = unit * weight if weight_ptr is not None else unit * keep_scale
        if bias_ptr is not None:
            before = before + bias
        # A dropped element passes no gradient, whatever its slope.
        if DROPOUT and not IN_WORDS:
            grad = tl.where(kept(words, bound, DROPS), grad, 0.0)
        grad = grad * slope(before, ACTIVATION, grad_x_ptr.dtype.element_ty)
        if weight_ptr is not None:
            weight_sums += grad * unit
        if bias_ptr is not None:
            bias_sums += grad
        inner = grad * weight if weight_ptr is not None else grad * keep_scale
        along, shift = two_sums(inner * unit, inner)
        along, shift = along * share, shift * share
        grad_x = inner * rstd - (unit * (along[:, None] * rstd) + shift[:, None] * rstd)
        store_known(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask, EXACT)
    out = program.to(tl.int64) * width + col
    if weight_ptr is not None:
        tl.store(weight_sums_ptr + out, tl.sum(weight_sums, axis=0) * keep_scale, mask=in_width)
    if bias_ptr is not None:
        tl.store(bias_sums_ptr + out, tl.sum(bias_sums, axis=0) * keep_scale, mask=in_width)


_forwards: LaunchCache[ForwardPlan] = LaunchCache()
_backwards: LaunchCache[BackwardPlan] = LaunchCache()


def _launch_options(x: Tensor, threads: tuple[int, int]) -> tuple[tuple[bool, int, int], int, dict[str, int]]:
    """Whether tiles are asked for ahead, their rows and columns; programs that a multiprocessor holds; warps and
    registers of each."""
    block_m, block_n, warps = tile(x.shape[-1])
    if threads is THREADS_BACKWARD and block_n >= 16384:
        warps = min(2 * warps, 32)  # the sums of such a row need more registers
    n_threads = threads[x.element_size() > 2]
    is_ahead = block_n * x.element_size() <= AHEAD_BYTES
    if threads is THREADS_FORWARD and is_ahead and block_m == 1 and x.numel() % (2 * block_n) == 0 and _in_words(x):
        block_m, n_threads = 2, THREADS_OF_TWO
    held = max(1, int(n_threads / (32 * warps) + 0.5))
    registers = min(REGISTERS // (held * 32 * warps) // 8 * 8, 248)
    return (is_ahead, block_m, block_n), held, {"num_warps": warps, "maxnreg": registers}


def is_narrow(seed: int) -> bool:
    """Whether a Triton that does not read the annotation would compile for a seed of 32 bits."""
    return -(2**31) <= seed < 2**31


def _in_words(x: Tensor) -> bool:
    """Whether x's device can compare and round two numbers of 16 bits by one instruction."""
    name = arch(x.device)
    return x.dtype == torch.bfloat16 and torch.version.hip is None and name[:2] == "sm" and int(name[2:]) >= 80


def _few(p: float) -> tuple[int, bool]:
    """The bits of the number of float16 below which are the halves of the rarer fate, and whether it is to be dropped."""
    count = round(p * 2**16)
    drops = 2 * count <= 2**16
    count = count if drops else 2**16 - count
    return (0xFC00 - count if count <= 0x7C00 else max(count - 0x7C01, 1)), drops


def _dropout(x: Tensor, p: float, activation: str, tiles: tuple[bool, int, int]) -> tuple[Any, ...]:
    """What kernels take of dropout and of tiles: scalars, the scale of what is kept first (0 at p = 1), and constants."""
    is_ahead, block_m, block_n = tiles
    is_full = x.shape[-1] == block_n and x.numel() // block_n % block_m == 0
    bound, drops = _few(p)
    in_words = p > 0 and is_full and is_ahead and _in_words(x)
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    return scale, bound, p > 0, drops, ACTIVATIONS[activation], accumulator(x)[1], is_full, in_words, *tiles


def norm_dropout_activation(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, p: float, seed: int, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    given = [tensor for tensor in (x, weight, bias) if tensor is not None]
    rest = eps, p, activation, is_narrow(seed), weight is None, bias is None
    plan = _forwards.get(rest, given)
    if plan is None:
        is_even = all(tensor.is_contiguous() for tensor in given)
        plan = outputs_of(x), _forward_launch(x, eps, p, activation), is_even
        _forwards.add(rest, given, plan)
    outputs, launch, is_even = plan
    if not is_even:
        x, weight, bias = (tensor if tensor is None else tensor.contiguous() for tensor in (x, weight, bias))  # pyright: ignore[reportAssignmentType]
    stream = stream_of(x)
    y, mean, rstd = outputs.like_x(x, stream), outputs.of_rows(x, stream), outputs.of_rows(x, stream)
    if launch is None:
        # What the mean of nothing is, as the reference has it.
        return y, mean.fill_(float("nan")), rstd.fill_(float("nan"))
    launch(x, weight, bias, y, mean, rstd, live=(seed,))
    return y, mean, rstd


def _forward_launch(x: Tensor, eps: float, p: float, activation: str) -> Launch | None:
    """Return the launch for calls on x's form, None if it has no numbers."""
    if not x.numel():
        return None
    width = x.shape[-1]
    n_rows = x.numel() // width
    tiles, held, options = _launch_options(x, THREADS_FORWARD)
    _, block_m, _ = tiles
    programs = min(-(-n_rows // block_m), multiprocessors(x.device) * held)
    scalars = n_rows, width, eps, *_dropout(x, p, activation, tiles)
    return Launch(_forward_kernel, (programs,), scalars, {}, **options)


def norm_dropout_activation_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    p: float,
    seed: int,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    tensors = grad, x, mean, rstd, weight, bias
    given = [tensor for tensor in tensors if tensor is not None]
    rest = p, activation, is_narrow(seed), weight is None, bias is None
    plan = _backwards.get(rest, given)
    if plan is None:
        is_even = all(tensor.is_contiguous() for tensor in given)
        vectors = weight is not None, bias is not None
        plan = _backward_plan(x, vectors, p, activation, is_even)
        _backwards.add(rest, given, plan)
    if not plan.is_even:
        tensors = tuple(tensor if tensor is None else tensor.contiguous() for tensor in tensors)
        grad, x, mean, rstd, weight, bias = tensors  # pyright: ignore[reportAssignmentType]
    stream = stream_of(x)
    grad_x = plan.outputs.like_x(x, stream)
    dtypes = [plan.outputs.dtype if vector is None else vector.dtype for vector in (weight, bias)]
    if plan.launch is None:
        return grad_x, *plan.add_up([], x, stream, dtypes)  # pyright: ignore[reportReturnType]
    sums = plan.sums(x, stream)
    plan.launch(grad, x, mean, rstd, weight, bias, grad_x, *sums, live=(seed,))
    return grad_x, *plan.add_up(sums, x, stream, dtypes)  # pyright: ignore[reportReturnType]


def _backward_plan(x: Tensor, vectors: tuple[bool, bool], p: float, activation: str, is_even: bool) -> BackwardPlan:
    """Lay out calls of this form."""
    outputs = outputs_of(x)
    if not x.numel():
        return BackwardPlan(outputs, vectors, 0, None, None, is_even)
    width, acc = x.shape[-1], accumulator(x)[1]
    n_rows = x.numel() // width
    tiles, held, options = _launch_options(x, THREADS_BACKWARD)
    _, block_m, _ = tiles
    programs = min(-(-n_rows // block_m), multiprocessors(x.device) * held)
    scalars = n_rows, width, *_dropout(x, p, activation, tiles)
    launch = Launch(_backward_kernel, (programs,), scalars, {}, **options)
    totals = totals_of(programs, width, sum(vectors), acc)
    return BackwardPlan(outputs, vectors, programs, launch, totals, is_even)
