"""Gated feed-forward network."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import SwiGLULayerConfig
from caramba.layer.float8 import Float8Linear
from caramba.layer.float8_swiglu import float8_feed_forward, is_fusible_swiglu
from caramba.layer.fused_linear import (
    FusedLinear,
    can_use_fused,
    fused_prefill_product,
    fused_product,
    products,
)
from caramba.ops import has_kernel, is_fused
from caramba.ops.swiglu import swiglu


class SwiGLULayer(nn.Module):
    """Gated feed-forward network: y = down(silu(gate(x)) * up(x)).

    Shape: [..., M] to [..., M], through d_ff features.

    Reference: Shazeer, 2020, arXiv:2002.05202.
    """

    residual_outputs: ClassVar[tuple[str, ...]] = ("down",)
    fusible_linears: ClassVar[tuple[str, ...]] = ("gate", "up")
    fuse_in_training: ClassVar[bool] = True

    def __init__(self, config: SwiGLULayerConfig) -> None:
        super().__init__()
        self.fused_linear: FusedLinear | None = None
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        if isinstance(self.gate, Float8Linear) and is_fusible_swiglu((self.gate, self.up, self.down)):
            return float8_feed_forward(x, self.gate, self.up, self.down)  # pyright: ignore[reportArgumentType]
        if has_kernel("swiglu_packed", x):
            # The compiler joins the gradients of both halves by computing either at every element of the pair.
            packed = fused_prefill_product(self.fused_linear, x)
            if packed is None:
                packed = fused_product(x, (self.gate, self.up))
            if packed is not None:
                return self.down(swiglu(packed))
        fused_linear = self.fused_linear
        gate, up = fused_linear(x) if can_use_fused(fused_linear, x) else products(x, (self.gate, self.up))
        return self.down(swiglu(gate, up) if is_fused("swiglu", gate) else F.silu(gate) * up)
