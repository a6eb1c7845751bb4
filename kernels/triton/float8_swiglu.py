"""Launchers of `caramba::float8_swiglu` and its backward: SwiGLU within the passes of a cast."""

from __future__ import annotations

from caramba.kernels.triton.float8_cast import GRADIENT, SWIGLU, Cast, run_cast
from torch import Tensor


def float8_swiglu(packed: Tensor, per_tensor: bool) -> Cast:
    return run_cast(SWIGLU, packed.contiguous(), packed.shape[0], packed.shape[1] // 2, per_tensor, False)


def float8_swiglu_backward(
    grad: Tensor, grad_scale: Tensor, column_scale: Tensor, packed: Tensor, per_tensor: bool, e5m2: bool
) -> Cast:
    given = grad.contiguous(), grad_scale.contiguous(), column_scale.contiguous()
    return run_cast(GRADIENT, packed.contiguous(), *grad.shape, per_tensor, e5m2, *given)
