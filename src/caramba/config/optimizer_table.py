"""Schema of the table of optimisers: the same model trained by each, with equal search, tokens and time."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from caramba.config.base import Config
from caramba.config.layer_base import Positive
from caramba.config.optimizer import Strategies

OptimizerRow = Literal["adamw", "lion", "muon", "swats", "pidao", "pidao_adaptive", "nowcast", "orchestrator"]
ROW_LR: dict[str, float] = {"lion": 0.2, "pidao": 2.0}
"""Rates that a row's search is around, as multiples of lr; others' are lr itself."""
ROW_KEYS: dict[str, dict[str, Any]] = {
    "swats": {"swats": {"tolerance": 1e-5}},
    "pidao": {"pidao": {"kp": 1000.0, "ki": 5.0, "kd": 20.0, "damping": 25.0}},
}


class OptimizersConfig(Config):
    """Held-out loss of one model trained by several optimisers, each with the same number of rates tried.

    Each row trains with every one of `rates` on one order of the data; the best by one half of the held-out windows
    then trains with `seeds` other orders, scored on the other half. Differences are paired with AdamW's by seed. Trials
    of `orchestrator` and `nowcast` count as steps of their own: their phase is as much shorter. With `equal_time`
    AdamW trains again for as many steps as take the row's seconds. With `objective: kl` rows distil copies of the
    student, as it comes from its teacher or a checkpoint, in place of fresh models, and losses are divergences.
    """

    type: Literal["optimizers"] = Field(description="kind of the benchmark")
    rows: Annotated[tuple[OptimizerRow, ...], Field(min_length=1)] = Field(
        default=("adamw", "lion", "muon", "swats", "pidao", "nowcast", "orchestrator"),
        description="optimisers to compare; adamw first",
    )
    objective: Literal["ce", "kl"] = Field(
        default="ce",
        description="ce: fresh models learn the text; kl: copies of the student learn its teacher's output",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of the computation")
    steps: Positive = Field(default=400, description="optimiser steps of a run, trials included")
    search_steps: Positive | None = Field(
        default=None, description="optimiser steps of the trial of a rate; unset: steps"
    )
    batch_size: Positive = Field(default=8, description="sequences of a step")
    block_size: Positive = Field(default=128, description="tokens of a sequence")
    lr: PositiveFloat = Field(default=4e-3, description="AdamW's rate, which the search is around")
    rates: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = Field(
        default=(0.25, 0.5, 1.0, 2.0, 4.0), description="multiples of the rate that every row tries"
    )
    weight_decay: NonNegativeFloat = Field(default=0.1, description="decoupled weight decay")
    seeds: Annotated[int, Field(ge=2)] = Field(default=5, description="orders of the data that are scored")
    val_windows: Annotated[int, Field(ge=4)] = Field(
        default=64, description="held-out windows, in two halves"
    )
    equal_time: bool = Field(default=True, description="whether AdamW is also trained for a row's seconds")
    strategies: Strategies = Field(
        default={}, description="strategies of the row orchestrator; unset: conservative_adamw, muon and lion"
    )
    decision_interval: Positive | None = Field(
        default=None, description="steps between decisions; unset: a quarter of the steps"
    )
    decisions: Positive | None = Field(
        default=None, description="most decisions with trials of a run; unset: as many as its steps hold"
    )
    eval_horizon: Positive = Field(default=8, description="steps of a trial")
    repeats: Annotated[int, Field(ge=2)] = Field(default=3, description="repeats of a trial")

    @model_validator(mode="after")
    def _rules(self) -> OptimizersConfig:
        if self.rows[0] != "adamw" or len(set(self.rows)) != len(self.rows):
            raise ValueError(
                f"rows={list(self.rows)}: every row is compared with adamw; name it first, and each row once"
            )
        return self
