"""What a topology may say of the layers, and what they cost; no torch is imported for it."""

from __future__ import annotations

from typing import Literal

from caramba.config import LayerConfig, Positive


class GatedConvLayerConfig(LayerConfig):
    """y = silu(gate(x)) * conv(x), conv a depthwise convolution over the last `kernel` tokens."""

    target = "gated_conv.layers:GatedConv"
    decoding = "cached"

    type: Literal["GatedConvLayer"] = "GatedConvLayer"
    d_model: Positive
    kernel: Positive = 4

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"gate.weight": (self.d_model, self.d_model), "conv.weight": (self.d_model, 1, self.kernel)}

    def cached_streams(self) -> tuple[tuple[str, int, int], ...]:
        return (("x", 1, self.d_model),)

    def macs_per_token(self) -> int:
        return self.d_model * (self.d_model + self.kernel)

    def saved_elements(self) -> int:
        return 5 * self.d_model  # x, gate, silu(gate), what conv reads and gives


class ScaledLayerConfig(LayerConfig):
    """y = scale * x, which looks at no other token."""

    target = "gated_conv.layers:Scaled"
    decoding = "per_token"

    type: Literal["ScaledLayer"] = "ScaledLayer"
    d_model: Positive

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"scale": (self.d_model,)}

    def macs_per_token(self) -> int:
        return 0  # as caramba counts: a product by element is no work worth counting

    def saved_elements(self) -> int:
        return self.d_model
