"""Layer normalisation."""

import torch
from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import LayerNormLayerConfig
from caramba.ops import is_fused
from caramba.ops.layer_norm import layer_norm


class LayerNormLayer(nn.LayerNorm):
    """Centre and scale the features: y = (x - mean) / sqrt(var + eps) * weight + bias.

    Shape: [..., M] to [..., M].

    Reference: Ba et al., 2016, arXiv:1607.06450.
    """

    def __init__(self, config: LayerNormLayerConfig) -> None:
        super().__init__(config.d_model, eps=config.eps, bias=config.bias)

    def forward(self, input: Tensor, ctx: Context | None = None) -> Tensor:
        # Autocast gives fp32 from 16-bit input here.
        if is_fused("layer_norm", input) and not torch.is_autocast_enabled(input.device.type):
            return layer_norm(input, self.weight, self.bias, self.eps)
        return super().forward(input)
