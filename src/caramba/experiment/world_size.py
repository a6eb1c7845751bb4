"""A run that resumes with another number of ranks: every step sees as many samples as it did, and the same ones."""

from __future__ import annotations

import dataclasses
import json

from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.experiment.session import Session
from caramba.runs.files import write_json
from caramba.runtime import Decision, RuntimePlan, load_plan

RANKS = "ranks.json"
DATA_PARALLEL = "data_parallel"


def keep_global_batch(session: Session) -> None:
    """Accumulate more or less in every phase of the group, where there are other ranks than the run began with.

    ranks.json holds how many shared the data then; a phase that was resized before has its own in plan.json.

    Raises:
        ConfigError: the samples of a step do not divide among the ranks.
    """
    path, now = session.run_dir / RANKS, session.data_ranks
    if not path.is_file():
        write_json(path, {DATA_PARALLEL: now})
        return
    first = int(json.loads(path.read_text())[DATA_PARALLEL])
    plan_file = session.run_dir / "plan.json"
    plans = load_plan(plan_file) if plan_file.is_file() else {}
    runs = []
    for run in session.group.runs:
        before = first if run.train is None else _ranks_of(plans.get(run.id), run.train, first)
        if run.train is not None and before != now:
            batch_size, times = resize_batch(run.id, run.train, before, now)
            reason = (
                f"the run began with {before} ranks and resumes with {now}: each step sees as many samples"
            )
            _record(
                session, run.id, {key: Decision(value, reason) for key, value in _keys(batch_size, times)}
            )
            logger.info(f"{run.id}: {now} ranks where there were {before}: batch_size={batch_size} x {times}")
            run = run.model_copy(
                update={"train": run.train.model_copy(update=dict(_keys(batch_size, times)))}
            )
        runs.append(run)
    session.group = session.group.model_copy(update={"runs": tuple(runs)})


def resize_batch(name: str, phase: PhaseConfig, before: int, now: int) -> tuple[int, int]:
    """Return batch_size and gradient_accumulation_steps with which `now` ranks take the steps of `before`.

    Raises:
        ConfigError: they cannot.
    """
    assert isinstance(phase.batch_size, int)
    batch_size, samples = phase.batch_size, phase.batch_size * phase.gradient_accumulation_steps * before
    if samples % now:
        raise ConfigError(
            f"run {name!r}: a step has {samples} samples (batch_size={batch_size} x "
            f"{phase.gradient_accumulation_steps} on {before} ranks), which {now} ranks do not share evenly; "
            f"start a divisor of {samples}"
        )
    own = samples // now
    size = next(part for part in range(min(batch_size, own), 0, -1) if own % part == 0)
    return size, own // size


def _keys(batch_size: int, times: int) -> tuple[tuple[str, int], ...]:
    return ("batch_size", batch_size), ("gradient_accumulation_steps", times)


def _ranks_of(planned: RuntimePlan | None, phase: PhaseConfig, first: int) -> int:
    """Return how many ranks the batch of a phase is for: those of its plan, where it goes by that, else the first."""
    if planned is None or DATA_PARALLEL not in planned.decisions:
        return first
    is_its_own = all(
        planned.value(key) == getattr(phase, key) for key in ("batch_size", "gradient_accumulation_steps")
    )
    return int(planned.value(DATA_PARALLEL)) if is_its_own else first


def _record(session: Session, run_id: str, changed: dict[str, Decision]) -> None:
    measured = session.measured.get(run_id)
    if measured is None:
        measured = RuntimePlan(run_id, session.plan_signatures[run_id], {}, {})
    session.measured[run_id] = dataclasses.replace(measured, decisions=measured.decisions | changed)
