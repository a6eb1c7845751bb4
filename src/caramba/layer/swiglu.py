"""Gated feed-forward network."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import SwiGLULayerConfig
from caramba.layer.float8 import Float8Linear
from caramba.layer.float8_swiglu import float8_feed_forward, is_one_function
from caramba.layer.fused_small_batch import are_unmodified, linear_residual, norm_linear
from caramba.layer.joined import Joined, prompt_product, usable
from caramba.layer.products import joined_product, products
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.small_batch import has_separate_norm
from caramba.ops import has_kernel, is_fused, swiglu


class SwiGLULayer(nn.Module):
    """Gated feed-forward network: y = down(silu(gate(x)) * up(x)).

    Shape: [..., M] to [..., M], through d_ff features.

    Reference: Shazeer, 2020, arXiv:2002.05202.
    """

    residual_outputs: ClassVar[tuple[str, ...]] = ("down",)
    joins: ClassVar[tuple[str, ...]] = ("gate", "up")
    joins_to_train: ClassVar[bool] = True

    def __init__(self, config: SwiGLULayerConfig) -> None:
        super().__init__()
        self.joined: Joined | None = None
        self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        if isinstance(self.gate, Float8Linear) and is_one_function((self.gate, self.up, self.down)):
            return float8_feed_forward(x, self.gate, self.up, self.down)  # pyright: ignore[reportArgumentType]
        if has_kernel("swiglu_packed", x):
            # The compiler joins the gradients of both halves by computing either at every element of the pair.
            packed = prompt_product(self.joined, x)
            if packed is None:
                packed = joined_product(x, (self.gate, self.up))
            if packed is not None:
                return self.down(swiglu(packed))
        joined = self.joined
        gate, up = joined(x) if usable(joined, x) else products(x, (self.gate, self.up))
        return self.down(swiglu(gate, up) if is_fused("swiglu", gate) else F.silu(gate) * up)

    def is_plain(self, x: Tensor) -> bool:
        """Whether `add_rows` takes few rows x: nobody replaced, quantised or watches a layer that it passes by."""
        is_one = self.joined is not None or not has_separate_norm(x)
        return is_one and are_unmodified((self.gate, self.up, self.down), x.dtype)

    def add_rows(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Return x + forward(norm(x)) of few rows: of joined weights two products and nothing else."""
        if self.joined is not None:
            return linear_residual(self.down, norm_linear(self.joined, x, norm, gated=True), x)
        return linear_residual(
            self.down, swiglu(norm_linear(self.gate, x, norm), norm_linear(self.up, x, norm)), x
        )
