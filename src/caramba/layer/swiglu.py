"""Gated feed-forward network."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import SwiGLULayerConfig
from caramba.ops import is_fused
from caramba.ops.swiglu import swiglu


class SwiGLULayer(nn.Module):
    """Gated feed-forward network: y = down(silu(gate(x)) * up(x)).

    Shape: [..., M] to [..., M], through d_ff features.

    Reference: Shazeer, 2020, arXiv:2002.05202.
    """

    residual_outputs: ClassVar[tuple[str, ...]] = ("down",)

    def __init__(self, config: SwiGLULayerConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        return self.down(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """Return silu(gate(x)) * up(x). Shape: [..., M] to [..., d_ff]."""
        gate, up = self.linears(x)
        return swiglu(gate, up) if is_fused("swiglu", gate) else F.silu(gate) * up

    def linears(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return gate(x) and up(x)."""
        return self.gate(x), self.up(x)
