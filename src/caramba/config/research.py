"""Schema of `research.gate`: the test that is registered before the first run of a research loop."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from caramba.config.base import Config
from caramba.config.layer import Positive


class GateConfig(Config):
    """One paired sequential test per candidate; a candidate is accepted only by it."""

    metric: str = Field(min_length=1, description="key of report.json that candidates are compared by")
    direction: Literal["less", "more"] = Field(description="which values of the metric are better")
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = Field(
        default=tuple(range(1, 11)), description="seeds, in order; each is run in both arms"
    )
    candidates: Positive = Field(default=5, description="most candidates of the loop")
    level: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        default=0.05, description="chance that a loop without any true improvement accepts one"
    )
    budget: Literal["tokens", "wall"] = Field(
        default="tokens", description="what both arms of a pair spend equally: tokens, or wall-clock seconds"
    )
    wall_tolerance: Annotated[float, Field(ge=0, le=0.2)] = Field(
        default=0.02, description="largest relative difference of wall-clock time"
    )

    @property
    def threshold(self) -> float:
        """The e-value from which a candidate is accepted: its share of the level, inverted."""
        return self.candidates / self.level

    @property
    def fewest_seeds(self) -> int:
        """Seeds that a candidate needs when it wins all of them: a seed at most doubles the e-value."""
        return math.ceil(math.log2(self.threshold))

    @model_validator(mode="after")
    def _can_decide(self) -> GateConfig:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("research.gate.seeds names a seed twice; name each once")
        if len(self.seeds) < self.fewest_seeds:
            raise ValueError(
                f"research.gate.seeds has {len(self.seeds)} seeds; {self.candidates} candidates at level "
                f"{self.level:g} need at least {self.fewest_seeds}; add seeds or allow fewer candidates"
            )
        return self
