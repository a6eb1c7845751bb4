"""Small-batch linears of decode steps, with the norm before and the residual sum after fused into each.

A step's time is that of reading the weights, and of the kernels between them. Where `small_batch_linear` has a kernel,
a block of a norm and a layer runs as the layer's products alone.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from caramba.layer.fused_linear import FusedLinear
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.small_batch import has_hooks
from caramba.ops.packed_int4 import WORDS
from caramba.ops.small_batch_linear import small_batch_linear, weight_fits


def are_unmodified(layers: Iterable[nn.Module | None], dtype: torch.dtype) -> bool:
    """True if linear layers are plain weights of a dtype or 8- or 4-bit `QuantizedLinear`.

    Layers quantised otherwise, sharded, hooked or with an adapter are not.
    """
    for layer in layers:
        if type(layer) is nn.Linear:
            weight_dtypes: tuple[torch.dtype, ...] = (dtype,)
        elif type(layer) is QuantizedLinear and layer.reduce is None:
            weight_dtypes = (torch.int8, WORDS)
        else:
            return False
        if has_hooks(layer):
            return False
        for one, expected in ((layer.weight, weight_dtypes), (layer.bias, (dtype,))):
            if one is not None and (type(one) is not nn.Parameter or one.dtype not in expected):
                return False
        if not weight_fits(layer.weight):
            return False
    return True


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
