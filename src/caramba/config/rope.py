"""Schema of rotary positions beyond the context that a model was trained on."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from caramba.config.base import Config
from caramba.config.layer_base import Positive


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
    attention_factor: Annotated[float, Field(gt=0)] | None = Field(
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
                raise ValueError(
                    f"{name} belongs to type={' and '.join(types)}, got type={self.type}; remove it"
                )
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor:g} must be below high_freq_factor={self.high_freq_factor:g}"
            )
        if self.type == "yarn" and self.beta_slow >= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow:g} must be below beta_fast={self.beta_fast:g}")
        return self
