"""The ops `caramba::layer_norm` and `caramba::add_layer_norm`, and the backward that they share."""

from typing import Any

import torch
from torch import Tensor

from caramba.ops.backend import call_op, caramba_op, check_rows, direct, empty_upcast, upcast


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Centre and scale rows: y = (x - mean) / sqrt(var + eps) * weight + bias, in at least fp32, rounded once.

    var is the mean of (x - mean)^2, taken after the mean and not as a difference of squares.

    Shape: x [..., D], weight and bias [D] or none, to [..., D], contiguous, in x's dtype.

    Raises:
        ConfigError: x that is not floating point, or a weight or bias that is not [D] on x's device.

    Reference: Ba et al., 2016, arXiv:1607.06450.
    """
    check_rows("layer_norm", x, weight=weight, bias=bias)
    run = direct("layer_norm", x, weight, bias) or torch.ops.caramba.layer_norm.default
    return run(x, weight, bias, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return (layer_norm(x + residual), x + residual); the sum is rounded to x's dtype before it is normalised.

    Shape: x and residual [..., D] of one dtype, weight and bias [D] or none, to two contiguous [..., D].

    Raises:
        ConfigError: as `layer_norm`, and a residual that differs from x in shape, dtype or device.
    """
    check_rows("add_layer_norm", x, residual, weight=weight, bias=bias)
    run = direct("add_layer_norm", x, residual, weight, bias) or torch.ops.caramba.add_layer_norm.default
    y, total, _, _ = run(x, residual, weight, bias, eps)
    return y, total


def normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x - mean) rstd [..., D], mean [...] and rstd [...] in the wide dtype."""
    wide = upcast(x)
    mean = wide.mean(-1)
    centred = wide - mean.unsqueeze(-1)
    rstd = torch.rsqrt(centred.pow(2).mean(-1) + eps)
    return centred * rstd.unsqueeze(-1), mean.contiguous(), rstd.contiguous()


def scale_and_shift(unit: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return unit weight + bias, without those that are not there."""
    y = unit if weight is None else unit * weight.to(unit.dtype)
    return y if bias is None else y + bias.to(unit.dtype)


def normalise_backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dx, dweight, dbias) for a wide `grad` of the scaled and shifted rows; dx is wide.

    With x^ = (x - mean) rstd and g = grad weight: dx = rstd (g - mean(g) - x^ mean(g x^)). dweight and dbias are
    empty where there is no such vector.
    """
    scale = rstd.unsqueeze(-1)
    unit = (upcast(x) - mean.unsqueeze(-1)) * scale
    inner = grad if weight is None else grad * weight.to(grad.dtype)
    grad_x = scale * (inner - inner.mean(-1, keepdim=True) - unit * (inner * unit).mean(-1, keepdim=True))
    rows = (grad * unit, grad)
    sums = [
        grad.new_empty(0) if vector is None else row.reshape(-1, row.shape[-1]).sum(0).to(vector.dtype)
        for row, vector in zip(rows, (weight, bias), strict=True)
    ]
    return grad_x, sums[0], sums[1]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], output[1], output[2], inputs[1], inputs[2])


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return *_gradients(ctx, grad, None), None


def _setup_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], output[2], output[3], inputs[2], inputs[3])


def _backward_add(
    ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    grad_x, grad_weight, grad_bias = _gradients(ctx, grad, grad_sum)
    return grad_x, grad_x, grad_weight, grad_bias, None


@caramba_op(
    "layer_norm",
    fake=lambda x, *_: (x.new_empty(x.shape), *(empty_upcast(x, x.shape[:-1]) for _ in range(2))),
    setup=_setup,
    backward=_backward,
)
def reference_layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch: (y, mean [...], rstd [...])."""
    unit, mean, rstd = normalise(x, eps)
    return scale_and_shift(unit, weight, bias).to(x.dtype).contiguous(), mean, rstd


@caramba_op(
    "add_layer_norm",
    fake=lambda x, *_: (
        *(x.new_empty(x.shape) for _ in range(2)),
        *(empty_upcast(x, x.shape[:-1]) for _ in range(2)),
    ),
    setup=_setup_add,
    backward=_backward_add,
)
def reference_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch: (y, sum, mean, rstd)."""
    total = (upcast(x) + upcast(residual)).to(x.dtype).contiguous()
    y, mean, rstd = reference_layer_norm(total, weight, bias, eps)
    return y, total, mean, rstd


@caramba_op(
    "layer_norm_backward",
    fake=lambda grad, grad_sum, x, mean, rstd, weight, bias: fake_gradients(x, weight, bias),
)
def reference_layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dx + grad_sum, dweight, dbias) in plain PyTorch."""
    grad_x, grad_weight, grad_bias = normalise_backward(upcast(grad), x, mean, rstd, weight, bias)
    if grad_sum is not None:
        grad_x = grad_x + upcast(grad_sum)
    return grad_x.to(x.dtype).contiguous(), grad_weight, grad_bias


def fake_gradients(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors as `layer_norm_backward` returns them, uninitialised."""
    vectors = [empty_upcast(x, (0,)) if vector is None else vector.new_empty(vector.shape) for vector in (weight, bias)]
    return x.new_empty(x.shape), vectors[0], vectors[1]


def _gradients(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    x, mean, rstd, weight, bias = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(x)
    grad_x, grad_weight, grad_bias = call_op("layer_norm_backward", grad, grad_sum, x, mean, rstd, weight, bias)
    return grad_x, None if weight is None else grad_weight, None if bias is None else grad_bias
