"""Layer normalisation."""

from __future__ import annotations

from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import LayerNormLayerConfig


class LayerNormLayer(nn.LayerNorm):
    """Centre and scale the features: y = (x - mean) / sqrt(var + eps) * weight + bias.

    Shape: [..., M] to [..., M].

    Reference: Ba et al., 2016, arXiv:1607.06450.
    """

    def __init__(self, config: LayerNormLayerConfig) -> None:
        super().__init__(config.d_model, eps=config.eps, bias=config.bias)

    def forward(self, input: Tensor, ctx: Context | None = None) -> Tensor:
        return super().forward(input)
