"""SwiGLU forward and backward: blocks of rows, or of the whole tensor where it is one run of memory."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

BLOCK, WARPS = 2048, 4


@triton.jit
def _place(width, n_blocks, BLOCK_N: tl.constexpr):
    """Row, columns and mask of this program."""
    program = tl.program_id(0)
    row = (program // n_blocks).to(tl.int64)
    col = (program % n_blocks).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, col, col < width


# Counts change from prompt to prompt, and no load depends on what divides them: one kernel serves all.
@triton.jit(do_not_specialize=["n_blocks"])
def _forward_kernel(
    gate_ptr, up_ptr, y_ptr, width, n_blocks, gate_row, up_row, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):
    row, col, mask = _place(width, n_blocks, BLOCK_N)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0).to(ACC)
    up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(ACC)
    y = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y_ptr + row * width + col, y.to(y_ptr.dtype.element_ty), mask=mask)


_forwards = Launches(_forward_kernel)


@triton.jit
def _backward_kernel(
    grad_ptr,
    gate_ptr,
    up_ptr,
    grad_gate_ptr,
    grad_up_ptr,
    width,
    n_blocks,
    gate_row,
    up_row,
    out_row,
    ACC: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row, col, mask = _place(width, n_blocks, BLOCK_N)
    grad = tl.load(grad_ptr + row * width + col, mask=mask, other=0.0).to(ACC)
    gate = tl.load(gate_ptr + row * gate_row + col, mask=mask, other=0.0).to(ACC)
    up = tl.load(up_ptr + row * up_row + col, mask=mask, other=0.0).to(ACC)
    share = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad * up * share * (1.0 + gate * (1.0 - share))
    tl.store(grad_gate_ptr + row * out_row + col, grad_gate.to(grad_gate_ptr.dtype.element_ty), mask=mask)
    grad_up = grad * gate * share
    tl.store(grad_up_ptr + row * out_row + col, grad_up.to(grad_up_ptr.dtype.element_ty), mask=mask)


_backwards = Launches(_backward_kernel)


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous [..., 2F] as two [R, F]."""
    rows = packed.view(-1, packed.shape[-1])
    return rows.chunk(2, dim=-1)  # pyright: ignore[reportReturnType]


def _options(x: Tensor, width: int) -> tuple[int, int, tl.dtype, int]:
    """Blocks of a row, elements of a block, accumulator and warps."""
    block = min(BLOCK, max(16, 1 << (width - 1).bit_length()))
    acc = tl.float64 if x.dtype == torch.float64 else tl.float32
    return -(-width // block), block, acc, max(1, WARPS * block // BLOCK)


def _forward(gate: Tensor, up: Tensor, y: Tensor, width: int, stride: int) -> None:
    """Rows of `width` elements, which begin every `stride` elements in gate and up."""
    n_rows = y.numel() // width
    key = (n_rows, width, stride, gate.dtype, up.dtype, gate.get_device())
    launch = _forwards.get(key)
    if launch is None:
        n_blocks, block, acc, warps = _options(gate, width)
        launch = _forwards.add(
            key, (n_rows * n_blocks,), (width, n_blocks, stride, stride), acc, block, num_warps=warps
        )
    launch(gate, up, y)


def _backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, width: int, stride: int
) -> None:
    n_rows = grad.numel() // width
    key = (n_rows, width, stride, grad.dtype, gate.dtype, up.dtype, gate.get_device())
    launch = _backwards.get(key)
    if launch is None:
        n_blocks, block, acc, warps = _options(gate, width)
        scalars = (width, n_blocks, stride, stride, stride)
        launch = _backwards.add(key, (n_rows * n_blocks,), scalars, acc, block, num_warps=warps)
    launch(grad, gate, up, grad_gate, grad_up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if size := y.numel():
        _forward(gate.contiguous(), up.contiguous(), y, size, size)
    return y


def swiglu_packed(packed: Tensor) -> Tensor:
    packed = packed.contiguous()
    y = packed.new_empty((*packed.shape[:-1], packed.shape[-1] // 2))
    if y.numel():
        _forward(*_halves(packed), y, y.shape[-1], packed.shape[-1])
    return y


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    shape = gate.shape
    grad_gate, grad_up = (torch.empty(shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    if size := grad.numel():
        _backward(grad.contiguous(), gate.contiguous(), up.contiguous(), grad_gate, grad_up, size, size)
    return grad_gate, grad_up


def swiglu_packed_backward(grad: Tensor, packed: Tensor) -> Tensor:
    packed = packed.contiguous()
    out = torch.empty_like(packed)
    if out.numel():
        _backward(grad.contiguous(), *_halves(packed), *_halves(out), grad.shape[-1], packed.shape[-1])
    return out
