"""Launchers of `caramba::layer_norm` and `caramba::add_layer_norm`."""

from __future__ import annotations

from caramba.kernels.triton.norm import norm_backward, norm_forward
from torch import Tensor


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    y, _, mean, rstd = norm_forward(x, None, weight, bias, eps, True)
    return y, mean, rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
    return norm_forward(x, residual, weight, bias, eps, True)


def layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return norm_backward(grad, grad_sum, x, mean.contiguous(), rstd, weight, bias)
