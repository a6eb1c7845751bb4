"""Formats of a model's weights at inference, and how the ranges of its activations are found."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from caramba.config.base import Config
from caramba.config.layer_base import Positive


class WeightFormat(StrEnum):
    """What linear layers store: codes of 8 or 4 bits, with 16-bit activations or 8-bit ones (`int8_dynamic`)."""

    INT8 = "int8"
    INT4 = "int4"
    INT8_DYNAMIC = "int8_dynamic"


class CalibrationConfig(Config):
    """How `int8_dynamic` finds the range of each activation channel on text: its largest magnitude, or a percentile.

    The ranges move size from activations to weights channel by channel, so that one scale per token serves all
    channels; a percentile keeps a few outlying tokens from setting them.
    """

    method: Literal["max", "percentile"] = Field(
        default="max",
        description="range of an activation channel: its largest magnitude (max) or a percentile",
    )
    percentile: Annotated[float, Field(ge=90, lt=100)] = Field(
        default=99.9, description="of method=percentile: of the magnitudes of each channel"
    )
    tokens: Positive = Field(default=2048, description="tokens of text that the ranges are taken from")

    @model_validator(mode="after")
    def _percentile_has_a_use(self) -> CalibrationConfig:
        default = type(self).model_fields["percentile"].default
        if self.method == "max" and self.percentile != default:
            raise ValueError(
                f"percentile={self.percentile:g} is of method=percentile, got method=max; set it, or leave it out"
            )
        return self
