"""Schemas of the layers: every field a user may set, and what follows. Attention has a file of its own."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from caramba.config.attention import AttentionLayerConfig as AttentionLayerConfig
from caramba.config.attention_dims import AttentionDims as AttentionDims
from caramba.config.attention_dims import AttentionMode as AttentionMode
from caramba.config.base import Probability as Probability
from caramba.config.cost import Cost, Width, WidthError, expect_width, layer_cost
from caramba.config.extension import TYPE
from caramba.config.layer_base import Dimension
from caramba.config.layer_base import LayerConfig as LayerConfig
from caramba.config.layer_base import Positive as Positive
from caramba.config.layer_base import RopeScalingConfig as RopeScalingConfig
from caramba.config.layer_base import Shapes as Shapes
from caramba.config.memory_bank import MemoryBankLayerConfig as MemoryBankLayerConfig


class RMSNormLayerConfig(LayerConfig):
    """Root-mean-square normalisation over the features (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

    target = "caramba.layer.rms_norm:RMSNormLayer"

    type: Literal["RMSNormLayer"] = Field(default="RMSNormLayer", description=TYPE)
    d_model: Dimension = Field(description="width of the input and output")
    eps: PositiveFloat = Field(default=1e-5, description="added to the mean square for stability")
    elementwise_affine: bool = Field(default=True, description="whether there is a learned gain per feature")

    def parameter_shapes(self) -> Shapes:
        """Return the scale, when there is one."""
        return {"weight": (self.d_model,)} if self.elementwise_affine else {}

    def infer(self, width: Width) -> Cost:
        """Check the width; backward keeps the input, the normalised input and the inverse root mean square."""
        expect_width(width, self.d_model, "d_model")
        return layer_cost("", self.type, width, width, self.parameter_shapes(), 2 * self.d_model + 1)


class LayerNormLayerConfig(LayerConfig):
    """Layer normalisation over the features (Ba et al., 2016, arXiv:1607.06450)."""

    target = "caramba.layer.layer_norm:LayerNormLayer"

    type: Literal["LayerNormLayer"] = Field(default="LayerNormLayer", description=TYPE)
    d_model: Dimension = Field(description="width of the input and output")
    eps: PositiveFloat = Field(default=1e-5, description="added to the variance for stability")
    bias: bool = Field(default=True, description="whether there is a learned offset per feature")

    def parameter_shapes(self) -> Shapes:
        """Return the scale and, with `bias`, the shift."""
        return {"weight": (self.d_model,)} | ({"bias": (self.d_model,)} if self.bias else {})

    def infer(self, width: Width) -> Cost:
        """Check the width; backward keeps the input, the mean and the inverse deviation."""
        expect_width(width, self.d_model, "d_model")
        return layer_cost("", self.type, width, width, self.parameter_shapes(), self.d_model + 2)


class SwiGLULayerConfig(LayerConfig):
    """Gated feed-forward network: down(silu(gate(x)) * up(x)) (Shazeer, 2020, arXiv:2002.05202)."""

    target = "caramba.layer.swiglu:SwiGLULayer"

    type: Literal["SwiGLULayer"] = Field(default="SwiGLULayer", description=TYPE)
    d_model: Dimension = Field(description="width of the input and output")
    d_ff: Dimension = Field(description="width of the hidden features")
    bias: bool = Field(default=False, description="whether the projections have biases")

    def parameter_shapes(self) -> Shapes:
        """Return the three matrices and, with `bias`, their biases."""
        m, f = self.d_model, self.d_ff
        shapes: Shapes = {"gate.weight": (f, m), "up.weight": (f, m), "down.weight": (m, f)}
        return shapes | ({"gate.bias": (f,), "up.bias": (f,), "down.bias": (m,)} if self.bias else {})

    def infer(self, width: Width) -> Cost:
        """Check the width; backward keeps the input, gate, silu(gate), up and their product."""
        expect_width(width, self.d_model, "d_model")
        return layer_cost(
            f"d_ff {self.d_ff}",
            self.type,
            width,
            width,
            self.parameter_shapes(),
            self.d_model + 4 * self.d_ff,
        )


class LinearLayerConfig(LayerConfig):
    """Linear map from `d_in` to `d_out` features; `reduce` first consumes a ParallelTopology's stack."""

    target = "caramba.layer.linear:LinearLayer"

    type: Literal["LinearLayer"] = Field(default="LinearLayer", description=TYPE)
    d_in: Dimension = Field(description="width of the input")
    d_out: Dimension = Field(description="width of the output")
    bias: bool = Field(default=False, description="whether there is a bias")
    reduce: Literal["mean", "sum", "concat"] | None = Field(
        default=None,
        description="reduction of the branches of a ParallelTopology: mean, sum or concat; unset: none",
    )

    def parameter_shapes(self) -> Shapes:
        """Return the matrix and, with `bias`, its bias."""
        return {"weight": (self.d_out, self.d_in)} | ({"bias": (self.d_out,)} if self.bias else {})

    def infer(self, width: Width) -> Cost:
        """Check the width: `reduce: concat` reads stack * d_model features, `mean` and `sum` read d_model."""
        if self.reduce is None:
            expect_width(width, self.d_in, "d_in")
        elif width.stack is None:
            raise WidthError(
                f"expects a stack (reduce: {self.reduce})",
                f"width {width.d_model}",
                "remove reduce, or feed it a ParallelTopology",
            )
        else:
            reduced = Width(width.features if self.reduce == "concat" else width.d_model)
            if reduced.d_model != self.d_in:
                message = f"expects width {self.d_in} after reduce: {self.reduce}"
                raise WidthError(message, f"{reduced.d_model} ({width.label})", f"set d_in: {reduced.d_model}")
        label = f"{self.d_in} -> {self.d_out}" + (f", reduce {self.reduce}" if self.reduce else "")
        return layer_cost(label, self.type, width, Width(self.d_out), self.parameter_shapes(), self.d_in)


class DropoutLayerConfig(LayerConfig):
    """Dropout; the identity in eval mode."""

    target = "caramba.layer.dropout:DropoutLayer"

    type: Literal["DropoutLayer"] = Field(default="DropoutLayer", description=TYPE)
    p: Probability = Field(description="probability that a feature is set to zero in training")

    def infer(self, width: Width) -> Cost:
        """Take any width of one stream; backward keeps the mask."""
        expect_width(width, width.d_model, "d_model")
        return layer_cost(f"p {self.p:g}", self.type, width, width, {}, width.d_model if self.p else 0)
