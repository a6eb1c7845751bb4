"""The largest batch of a row of the training ladder, and what kept the search from a larger one."""

from __future__ import annotations

import dataclasses
from typing import Any

from caramba.config.benchmark import LadderConfig
from caramba.config.model import ModelSpec
from caramba.errors import OutOfMemory
from caramba.experiment.ladder_steps import LadderSteps, Taken, take_steps
from caramba.experiment.planning import Budget, Ended, StepCandidate, Trial, largest_batch
from caramba.experiment.session import Session
from caramba.runtime import free_bytes, release_memory


@dataclasses.dataclass(frozen=True)
class Largest:
    """A search's best trial, None where none has fitted, all trials, and why it ended there.

    `ended` is `speed`: larger batches take longer per sequence; `time`: the seconds were used up; `most_batch`, or
    `data` where the training text has fewer windows; `memory`: a larger batch does not fit.
    """

    best: Trial | None
    trials: list[Trial]
    ended: str
    budget: Budget


def find_largest(
    session: Session,
    config: LadderConfig,
    spec: ModelSpec,
    steps: LadderSteps,
    *,
    taken: Taken | None,
    first: int,
    seconds: float,
) -> Largest:
    """Find the largest batch of a row, one micro-batch a step.

    Args:
        taken: what the row's own batch took in steps of one micro-batch, which is not tried again.
        first: the batch to begin with, where the row before ended: each that a compiled row tries is compiled again.
    """
    budget = Budget(seconds)
    candidate = StepCandidate(1, compile_model=bool(steps.keys.get("compile_model")))
    known = None
    if taken is not None and len(taken.seconds) > candidate.warm_up:
        known = Trial(
            dataclasses.replace(candidate, batch_size=steps.batch_size), taken.seconds, taken.peak_bytes
        )

    def measure(candidate: StepCandidate) -> Trial:
        n_steps = candidate.warm_up + candidate.timed
        tried = dataclasses.replace(steps, batch_size=candidate.batch_size, accumulation=1, n_steps=n_steps)
        try:
            taken = take_steps(session, config, spec, tried, fresh=None)
        except OutOfMemory:
            release_memory()
            return Trial(candidate, refusal="out of memory", is_out_of_memory=True)
        return Trial(candidate, taken.seconds, taken.peak_bytes)

    release_memory()
    target = config.memory_utilization * free_bytes(session.device)
    windows = len(session.windows("train", config.block_size))
    best, trials, ended = largest_batch(
        measure,
        candidate,
        target_bytes=target,
        most=min(config.most_batch, windows),
        budget=budget,
        known=known,
        first=first,
    )
    return Largest(best, trials, name_limit(ended, config.most_batch, windows), budget)


def name_limit(ended: Ended, most: int, windows: int) -> str:
    """Say why no larger batch was taken: see `Largest`."""
    if ended == "most":
        return "most_batch" if most <= windows else "data"
    return ended


def largest_row(found: Largest, block_size: int, first: dict[str, Any] | None) -> dict[str, Any]:
    """Return a row's figures at its largest batch, with those of the ladder's `first` row at its own."""
    if found.best is None:
        has_time_left = found.ended != "time"
        why = "not even one sequence fits" if has_time_left else "; ".join(found.budget.skipped)
        return {"largest_skipped": why, "largest_s": found.budget.spent}
    tok_s = found.best.samples_per_s * block_size
    row: dict[str, Any] = {
        "largest_batch": found.best.candidate.batch_size,
        "largest_ended": found.ended,
        "largest_tok_s": tok_s,
        "largest_peak_bytes": found.best.peak_bytes,
        "largest_trials": [trial.candidate.batch_size for trial in found.trials],
        "largest_not_tried": "; ".join(found.budget.skipped) or None,
        "largest_s": found.budget.spent,
    }
    if first is not None and "largest_tok_s" in first:
        row["largest_speed_up"] = tok_s / first["largest_tok_s"]
    return row
