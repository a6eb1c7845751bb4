"""A small batch before its norm: linear layers whose kernel normalises what it reads take it in the place of x."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from caramba.layer.rms_norm import RMSNorm
from caramba.ops.small_batch_linear import small_batch_linear


class PreNorm(NamedTuple):
    """Rows x [..., M] and the norm that belongs before the linear layers that read them.

    A textbook forward takes it in the place of norm(x); a layer that was not lowered to take it raises.
    """

    x: Tensor
    norm: RMSNorm

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device


class LinearWeights(Protocol):
    """What a product needs of a linear layer, fused or not."""

    @property
    def weight(self) -> Any: ...

    @property
    def bias(self) -> Any: ...


def norm_linear(layer: LinearWeights, rows: PreNorm, *, gated: bool = False) -> Tensor:
    """Return layer(norm(x)), or silu(gate) * up of a fused layer if `gated`. Shape: [..., M] to [..., N]."""
    return small_batch_linear(
        rows.x,
        layer.weight,
        layer.bias,
        scale=getattr(layer, "scale", None),
        norm=rows.norm.weight,
        eps=rows.norm.eps,
        gated=gated,
    )


def linear_residual(layer: LinearWeights, x: Tensor, residual: Tensor) -> Tensor:
    """Return residual + layer(x). Shape: [..., M] and [..., N] to [..., N]."""
    scale = getattr(layer, "scale", None)
    return small_batch_linear(x, layer.weight, layer.bias, scale=scale, residual=residual)


class NormLinear(nn.Module):
    """A linear layer, quantised or not, that normalises a `PreNorm` as it reads it."""

    weight: Any
    bias: Any

    def forward(self, input: Tensor, *rest: object) -> Tensor:
        if isinstance(input, PreNorm):
            return norm_linear(self, input)
        return super().forward(input, *rest)  # pyright: ignore[reportAttributeAccessIssue]
