"""Schema of `research:`: a loop of drafts, reviews and experiments, and the test that is registered before it."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from caramba.config.base import Config, PathText
from caramba.config.layer_base import Positive
from caramba.config.review import Score


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

    held_out: PathText | None = Field(
        default=None,
        description="tokens that no search run reads, opened once for the winner; a loop with experiments needs it",
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


class LoopBudgetConfig(Config):
    """What a whole loop may spend: writer, reviewer and experiments together. Unset is no limit."""

    max_cost_usd: PositiveFloat | None = Field(default=None, description="US dollars of all requests")
    max_tokens: Positive = Field(default=3_000_000, description="prompt and reply tokens of all requests")
    max_calls: Positive = Field(
        default=300, description="requests to language models, failed attempts included"
    )
    max_wall_hours: PositiveFloat = Field(default=24.0, description="hours of the loop while it runs")
    max_gpu_hours: PositiveFloat = Field(default=24.0, description="hours of all experiments")


class ResearchLoopConfig(Config):
    """A loop that drafts, reviews, runs proposed experiments under a registered test, and redrafts."""

    max_iterations: Positive = Field(default=5, description="most rounds of draft, review and experiments")
    max_experiments_per_iteration: NonNegativeInt = Field(
        default=2, description="most experiments of a round"
    )
    max_total_experiments: NonNegativeInt = Field(default=5, description="most experiments of the loop")
    min_score_to_approve: Score = Field(
        default=7.5, description="score, of 10, from which a paper can be approved"
    )
    auto_approve_score: Score = Field(
        default=9.0, description="score from which minor findings need no further round; it bypasses no gate"
    )
    auto_run_experiments: bool = Field(
        default=False, description="true: proposed experiments run without a person's confirmation"
    )
    save_all_versions: bool = Field(
        default=True, description="false: only the newest version of the paper is kept"
    )
    experiment_timeout_s: PositiveFloat = Field(
        default=3600.0, description="seconds after which a run counts as failed; reserved before it begins"
    )
    gate: GateConfig | None = Field(default=None, description="the registered test; unset: no experiments")
    budget: LoopBudgetConfig = Field(default=LoopBudgetConfig(), description="what the loop may spend")

    @model_validator(mode="after")
    def _fits(self) -> ResearchLoopConfig:
        if self.auto_approve_score < self.min_score_to_approve:
            raise ValueError("auto_approve_score is below min_score_to_approve; raise it")
        if self.gate is not None and self.max_total_experiments > self.gate.candidates:
            raise ValueError(
                f"max_total_experiments={self.max_total_experiments} is more than research.gate.candidates="
                f"{self.gate.candidates}; lower it or register more"
            )
        return self
