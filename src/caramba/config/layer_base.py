"""The base of the layers, rotary positions beyond the trained context, and the number types that schemas share."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, model_validator

from caramba.config.base import Config
from caramba.config.cost import Cost, Unknown, Width, expect_width, layer_cost
from caramba.config.extension import NodeConfig
from caramba.config.kvcache import Streams

Positive = Annotated[int, Field(gt=0, le=2**63 - 1)]
"""What a 64-bit integer of torch holds."""
Dimension = Annotated[int, Field(gt=0, le=2**31 - 1)]
"""A width of a layer; products of two are sizes of tensors."""
Shapes = dict[str, tuple[int, ...]]

Decoding = Literal["per_token", "cached", "refused"]


class LayerConfig(NodeConfig):
    """A node without children; the torch module has exactly the tensors of `parameter_shapes`.

    A custom layer declares by `decoding` how its model may be decoded token by token: `per_token` looks at no other
    token and needs no cache, `cached` keeps the streams of `cached_streams`, and a model with a `refused` layer decodes
    with no cache, and so not at all. The layers of caramba answer for themselves.
    """

    decoding: ClassVar[Decoding] = "refused"

    def parameter_shapes(self) -> Shapes:
        """Return every trainable tensor's shape; those of two or more dimensions multiply activations."""
        return {}

    def cached_streams(self) -> Streams:
        """Return (name, heads, width per head) of what a `cached` layer keeps of every token: [B, heads, S, width]."""
        return ()

    def macs_per_token(self) -> int | None:
        """Return the multiplications of a forward per token, without those of biases and norms; None is unknown."""
        return None

    def saved_elements(self) -> int | None:
        """Return the elements per token that autograd keeps for the backward pass; None is unknown."""
        return None

    def infer(self, width: Width) -> Cost:
        """Check the width that comes in and return what the layer costs.

        A layer of a person's own need not define it where it takes and gives `d_model` features, a field of that name:
        its cost is then what its other methods declare.

        Raises:
            WidthError: the layer does not take this width.
        """
        d_model: int | None = getattr(self, "d_model", None)
        if d_model is None:
            return super().infer(width)
        expect_width(width, d_model, "d_model")
        macs = self.macs_per_token()
        cost = layer_cost(
            "",
            self.type,
            width,
            width,
            self.parameter_shapes(),
            self.saved_elements(),
            streams=self.cached_streams(),
        )
        unknown: set[tuple[Unknown, str]] = {("flops", self.type)} if macs is None else set()
        return dataclasses.replace(cost, matmul_params_used=macs or 0, unknown=cost.unknown | unknown)


class RopeScalingConfig(Config):
    """Rescaling of the rotary frequencies for contexts longer than those a model was trained on.

    `llama3` is the banded interpolation of Llama 3.1 (Grattafiori et al., 2024, arXiv:2407.21783); `linear`
    divides every frequency by `factor` (Chen et al., 2023, arXiv:2306.15595); `dynamic` widens the base with the
    length of each forward beyond `original_max_position_embeddings`; `yarn` interpolates by band and scales the
    rotated features by `attention_factor`, 0.1 ln(factor) + 1 unless given (Peng et al., 2023, arXiv:2309.00071).
    """

    type: Literal["llama3", "linear", "dynamic", "yarn"] = Field(
        description="rule of the rescaling: llama3, linear, dynamic or yarn"
    )
    factor: Annotated[float, Field(ge=1.0)] = Field(
        default=1.0, description="factor by which the context grows; 1 changes nothing"
    )
    low_freq_factor: float = Field(
        default=1.0,
        description="type=llama3: lower end of the interpolated band, in periods per trained context",
    )
    high_freq_factor: float = Field(
        default=4.0,
        description="type=llama3: upper end of the interpolated band, in periods per trained context",
    )
    original_max_position_embeddings: Positive = Field(
        default=8192, description="context that the model was trained on, in tokens"
    )
    beta_fast: float = Field(
        default=32.0,
        description="type=yarn: rotations per trained context above which a frequency is unchanged",
    )
    beta_slow: float = Field(
        default=1.0,
        description="type=yarn: rotations per trained context below which a frequency is divided by factor",
    )
    attention_factor: PositiveFloat | None = Field(
        default=None, description="type=yarn: scale of the rotated features; unset: 0.1 ln(factor) + 1"
    )

    _belongs: ClassVar[dict[str, tuple[str, ...]]] = {
        "low_freq_factor": ("llama3",),
        "high_freq_factor": ("llama3",),
        "original_max_position_embeddings": ("llama3", "dynamic", "yarn"),
        "beta_fast": ("yarn",),
        "beta_slow": ("yarn",),
        "attention_factor": ("yarn",),
    }

    @model_validator(mode="after")
    def _rules(self) -> RopeScalingConfig:
        for name, types in self._belongs.items():
            # A frozen manifest states every field, so what counts is another value than the default.
            if self.type not in types and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} belongs to type={' and '.join(types)}, got type={self.type}; remove it")
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor:g} must be below high_freq_factor={self.high_freq_factor:g}"
            )
        if self.type == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow:g} must be below beta_fast={self.beta_fast:g}")
        return self
