"""Launchers of `caramba::rms_norm` and `caramba::add_rms_norm`."""

from __future__ import annotations

from caramba.kernels.triton.norm import norm_backward, norm_forward
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    y, _, _, rstd = norm_forward(x, None, weight, None, eps, False)
    return y, rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    y, total, _, rstd = norm_forward(x, residual, weight, None, eps, False)
    return y, total, rstd


def rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    return norm_backward(grad, grad_sum, x, None, rstd, weight, None)[:2]
