"""Small-batch linears of decode steps, with the norm before and the residual sum after fused into each."""

from __future__ import annotations

from torch import Tensor, nn

from caramba.layer.fused_linear import FusedLinear
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.layer.rms_norm import RMSNorm
from caramba.ops.small_batch_linear import small_batch_linear


def norm_linear(
    layer: nn.Linear | QuantizedLinear | FusedLinear, x: Tensor, norm: RMSNorm, *, gated: bool = False
) -> Tensor:
    """Return layer(norm(x)), or silu(gate) * up of a fused layer if `gated`. Shape: [..., M] to [..., N]."""
    scale = None if isinstance(layer, nn.Linear) else layer.scale
    return small_batch_linear(
        x, layer.weight, layer.bias, scale=scale, norm=norm.weight, eps=norm.eps, gated=gated
    )


def linear_residual(layer: nn.Linear | QuantizedLinear, x: Tensor, residual: Tensor) -> Tensor:
    """Return residual + layer(x). Shape: [..., M] and [..., N] to [..., N]."""
    scale = None if isinstance(layer, nn.Linear) else layer.scale
    return small_batch_linear(x, layer.weight, layer.bias, scale=scale, residual=residual)
