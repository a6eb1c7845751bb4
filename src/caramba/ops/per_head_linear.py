"""The op `caramba::per_head_linear`: a linear map per head, to [B, T, H, D]."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, has_kernel, upcast
from caramba.ops.first_order import refuse_gradients
from caramba.ops.latent_queries import HALF


def per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return x_h W_h for every head h, sums in at least fp32, rounded once; there are no gradients.

    Shape: x [B, T, H, R] of any strides, weight [H, R, D], to [B, T, H, D], contiguous, in x's dtype.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit, or gradients that are wanted.
    """
    if x.dim() != 4 or not x.is_floating_point():
        raise ConfigError(
            f"per_head_linear: x is {x.dtype} of shape {tuple(x.shape)}, expected floating [B, T, H, R]"
        )
    fits = weight.dim() == 3 and weight.shape[:2] == x.shape[2:] and weight.is_floating_point()
    if not fits or weight.device != x.device:
        raise ConfigError(
            f"per_head_linear: weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}, expected floating "
            f"[{x.shape[2]}, {x.shape[3]}, D] on {x.device}"
        )
    refuse_gradients("per_head_linear", x, weight)
    if has_kernel("per_head_linear", x) and x.dtype not in HALF:
        return reference_per_head_linear(x, weight)
    return call_op("per_head_linear", x, weight)


@caramba_op("per_head_linear", fake=lambda x, weight: x.new_empty((*x.shape[:-1], weight.shape[-1])))
def reference_per_head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the op in plain PyTorch."""
    wide = upcast(x)
    return torch.einsum("bthr,hrd->bthd", wide, weight.to(x.dtype).to(wide.dtype)).to(x.dtype).contiguous()
