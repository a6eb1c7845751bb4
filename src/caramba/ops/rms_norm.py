"""The ops `caramba::rms_norm` and `caramba::add_rms_norm`, and the backward that they share."""

from typing import Any

import torch
from torch import Tensor

from caramba.ops.backend import call_op, caramba_op, check_rows, direct, empty_upcast, upcast


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Scale rows to unit root mean square: y = x / sqrt(mean(x^2) + eps) * weight, in at least fp32, rounded once.

    Shape: x [..., D], weight [D] or none, to [..., D], contiguous, in x's dtype.

    Raises:
        ConfigError: x that is not floating point, or a weight that is not [D] on x's device.

    Reference: Zhang and Sennrich, 2019, arXiv:1910.07467.
    """
    check_rows("rms_norm", x, weight=weight)
    run = direct("rms_norm", x, weight) or torch.ops.caramba.rms_norm.default
    return run(x, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normalised.

    Shape: x and residual [..., D] of one dtype, weight [D] or none, to two contiguous [..., D].

    Raises:
        ConfigError: as `rms_norm`, and a residual that differs from x in shape, dtype or device.
    """
    check_rows("add_rms_norm", x, residual, weight=weight)
    run = direct("add_rms_norm", x, residual, weight) or torch.ops.caramba.add_rms_norm.default
    y, total, _ = run(x, residual, weight, eps)
    return y, total


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, grad, None), None


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], inputs[2], output[2])


def _backward_add(
    ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight = _gradients(ctx, grad, grad_sum)
    return grad_x, grad_x, grad_weight, None


@caramba_op(
    "rms_norm",
    fake=lambda x, *_: (x.new_empty(x.shape), empty_upcast(x, x.shape[:-1])),
    setup=_setup,
    backward=_backward,
)
def reference_rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch: (y, rstd [...] in the wide dtype)."""
    wide = upcast(x)
    rstd = torch.rsqrt(wide.pow(2).mean(-1) + eps)
    y = wide * rstd.unsqueeze(-1)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype).contiguous(), rstd.contiguous()


@caramba_op(
    "add_rms_norm",
    fake=lambda x, *_: (x.new_empty(x.shape), x.new_empty(x.shape), empty_upcast(x, x.shape[:-1])),
    setup=_setup_add,
    backward=_backward_add,
)
def reference_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch: (y, sum, rstd)."""
    total = (upcast(x) + upcast(residual)).to(x.dtype).contiguous()
    y, rstd = reference_rms_norm(total, weight, eps)
    return y, total, rstd


@caramba_op(
    "rms_norm_backward",
    fake=lambda grad, grad_sum, x, rstd, weight: (
        x.new_empty(x.shape),
        empty_upcast(x, (0,)) if weight is None else weight.new_empty(weight.shape),
    ),
)
def reference_rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute (dx, dweight) in plain PyTorch, with x^ = x rstd and g = grad weight:

    dx = rstd (g - x^ mean(g x^)) + grad_sum, dweight = sum over rows of grad x^; empty without a weight.
    """
    wide = upcast(grad)
    scale = rstd.unsqueeze(-1)
    unit = upcast(x) * scale
    inner = wide if weight is None else wide * weight.to(wide.dtype)
    grad_x = scale * (inner - unit * (inner * unit).mean(-1, keepdim=True))
    if grad_sum is not None:
        grad_x = grad_x + upcast(grad_sum)
    if weight is None:
        return grad_x.to(x.dtype).contiguous(), wide.new_empty(0)
    grad_weight = (wide * unit).flatten(0, -2).sum(0) if x.dim() > 1 else wide * unit
    return grad_x.to(x.dtype).contiguous(), grad_weight.to(weight.dtype).contiguous()


def _gradients(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Tensor, Tensor | None]:
    x, weight, rstd = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(x)
    grad_x, grad_weight = call_op("rms_norm_backward", grad, grad_sum, x, rstd, weight)
    return grad_x, None if weight is None else grad_weight
