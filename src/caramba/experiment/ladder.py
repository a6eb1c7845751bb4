"""The training ladder: each means of speed or memory on top of those before it, each row a stage of its own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caramba import kernels
from caramba.config.benchmark import (
    RUNGS,
    BenchmarkConfig,
    LadderConfig,
    RowName,
    fastest,
    row_keys,
    top_of,
    without,
)
from caramba.config.estimate import estimate_phase, model_cost
from caramba.config.model import ModelSpec
from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.errors import ConfigError, KernelUnavailable, OutOfMemory
from caramba.experiment.planning import Budget, Ended, StepCandidate, Stopwatch, Trial, largest_batch
from caramba.experiment.session import Session
from caramba.experiment.stages import fit_apart
from caramba.infer.nll import windowed_nll
from caramba.layer import attention_backends
from caramba.model import Model, build_model, build_with_random_weights
from caramba.ops.backend import REFERENCE, without_kernels
from caramba.result import BenchmarkResult, Metric
from caramba.runtime import AttentionChoice, MemoryMeter, free_bytes, release_memory, seed_process
from caramba.train import FitOutcome

LOGITS = 2**27  # elements of one batch of the held-out loss
PLAIN_ATTENTION = AttentionChoice(("math",), False, "the ladder's rows before flash", uses_varlen=False)


@dataclass(frozen=True)
class LadderSteps:
    """How a row's steps are taken: the phase's keys, which surroundings are on, and how many sequences.

    `twin` is 0 but for runs that differ from a row's in rounding and in random numbers (dropout, stochastic rounding),
    each with a number of its own.
    """

    keys: dict[str, Any]
    is_flash: bool
    has_kernels: bool
    batch_size: int
    accumulation: int
    n_steps: int
    twin: int = 0


@dataclass(frozen=True)
class Taken:
    """What steps took: seconds of each optimiser step, peaks of memory, MFU per token/s, the held-out loss."""

    seconds: tuple[float, ...]
    peak_bytes: int
    peak_allocated_bytes: float | None
    mfu_per_tok_s: float | None
    train_loss: float
    val_loss: float | None


def take_steps(
    session: Session, config: LadderConfig, spec: ModelSpec, steps: LadderSteps, *, fresh: Model | None
) -> Taken:
    """Train a fresh model for a row's steps through `fit`, as any phase is trained.

    Args:
        fresh: whose weights a copy begins with; it is then evaluated on held-out text. Without, a stand-in is timed.

    Raises:
        ConfigError: the device cannot do what the row asks for.
        OutOfMemory: the batch does not fit.
    """
    phase = PhaseConfig.model_validate(
        {
            "phase": "pretrain",
            "trains": "student",
            "steps": steps.n_steps,
            "batch_size": steps.batch_size,
            "gradient_accumulation_steps": steps.accumulation,
            "block_size": config.block_size,
            "scheduler": config.scheduler,
            "warmup_steps": int(config.lr_warmup_ratio * steps.n_steps),
            "lr": config.lr,
            "float8_min_width": config.float8_min_width,
            **steps.keys,
        }
    )
    plan = session.plan(phase, "ladder", spec.embedder.d_model)
    phase = phase.model_copy(update={"lr": plan.value("lr")})
    torch.compiler.reset()
    seed_process(session.manifest.seed, steps.twin)  # draws alone; the order of the data has its own
    meter = MemoryMeter(session.device)
    meter.start()  # which also gives back what the row before it left
    if fresh is None:
        model = build_with_random_weights(spec, session.device).train()
    else:
        model = copy.deepcopy(fresh).to(session.device).train()
        if steps.twin:
            move_by_one_ulp(model, steps.twin)
    watch = Stopwatch(session.device, steps.n_steps, 1)
    with tempfile.TemporaryDirectory() as folder, _surroundings(session, steps):
        outcome = fit_apart(
            session,
            phase,
            plan,
            model,
            Path(folder),
            seed=session.manifest.seed,
            callbacks=[watch],
            flops_per_token=estimate_phase(phase, model_cost(spec), None).flops_per_token,
        )
    peak = meter.peak_bytes()
    return Taken(
        tuple(watch.seconds),
        peak,
        outcome.measured.get("peak_allocated_bytes"),
        _mfu_per_tok_s(outcome),
        outcome.loss,
        None if fresh is None else _held_out_loss(session, config, model),
    )


@torch.no_grad()
def move_by_one_ulp(model: Model, seed: int) -> None:
    """Move every weight to the next number of its type, up or down randomly: a change as small as rounding is."""
    weights = list(model.parameters())
    draws = torch.Generator(weights[0].device).manual_seed(seed)
    for weight in weights:
        up = torch.rand(weight.shape, generator=draws, device=weight.device) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype)))


@contextlib.contextmanager
def _surroundings(session: Session, steps: LadderSteps) -> Iterator[None]:
    """Attend by plain products, and run no kernel of ours, until the ladder has come to them."""
    choice = session.attention if steps.is_flash else PLAIN_ATTENTION
    unattached: AbstractContextManager[Any] = contextlib.nullcontext() if steps.has_kernels else without_kernels()
    with attention_backends(session.device, choice), unattached:
        yield


def _mfu_per_tok_s(outcome: FitOutcome) -> float | None:
    measured = outcome.measured
    return measured["mfu"] / measured["tokens_per_s"] if "mfu" in measured else None


def _held_out_loss(session: Session, config: LadderConfig, model: Model) -> float:
    """Return the loss of the trained weights on held-out windows, computed in float32 for every row."""
    per_batch = max(1, LOGITS // (config.block_size * model.spec.embedder.vocab_size))
    found = windowed_nll(
        model.to(session.device).float(),
        session.windows("val", config.block_size),
        windows=config.val_windows,
        batch_size=min(per_batch, 16),
        device=session.device,
    )
    return found.mean


def spread(values: tuple[float, ...] | list[float]) -> tuple[float, float, float]:
    """Return the median of values and the range of their middle 60%."""
    p20, median, p80 = (float(value) for value in np.percentile(values, [20, 50, 80]))
    return median, p20, p80


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
        known = Trial(dataclasses.replace(candidate, batch_size=steps.batch_size), taken.seconds, taken.peak_bytes)

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


UNITS = {
    "step_ms": "ms",
    "tok_s": "tokens/s",
    "speed_up": "ratio",
    "mfu": "share",
    "peak_bytes": "bytes",
    "memory_ratio": "ratio",
    "val_loss": "nats/token",
    "val_loss_delta": "nats/token",
    "loss_noise": "nats/token",
    "largest_batch": "sequences",
    "largest_tok_s": "tokens/s",
    "largest_speed_up": "ratio",
    "largest_peak_bytes": "bytes",
}
REPEATS = {"step_ms": "timed_steps", "tok_s": "timed_steps", "loss_noise": "loss_runs"}
LEFT_OUT, TWIN = "without_", "twin_"
Row = dict[str, Any]


class Ladder:
    """One ladder of a session: its rows so far, in the order in which they were measured.

    Attributes:
        on: the rows whose means the next row has; what the device cannot do is not among them.
    """

    def __init__(self, session: Session, bench: BenchmarkConfig, role: str) -> None:
        assert isinstance(bench.config, LadderConfig)
        self.session, self.bench, self.config = session, bench, bench.config
        self.model, self.spec = role, session.model_of(role).spec
        self.on: list[RowName] = []
        self.rows: list[Row] = []
        self.largest_left = float(self.config.largest_seconds)
        self.largest_batch = 1  # of the row before, where the search of the next one begins
        self._fresh: Model | None = None

    def climb(self) -> None:
        """Measure every row that is not on record yet."""
        rows: Sequence[RowName] = self.config.rows
        for name in rows:
            if name == "largest_batch":
                self._stage(name, functools.partial(self._best_of_largest, name))
                continue
            self._stage(name, functools.partial(self._row, name))
            if self.rows and self.rows[-1]["row"] == name and self.rows[-1]["skipped"] is None:
                self.on.append(name)
        top = top_of(self.rows, self.config.loss_tolerance)
        if top is None:
            return
        names = self.on[: self.on.index(top["row"]) + 1]
        for twin in range(1, self.config.twins + 1):
            self._stage(f"{TWIN}{twin}", functools.partial(self._twin, names, twin))
        for name in names if self.config.leave_one_out else ():
            if name != "baseline":
                self._stage(LEFT_OUT + name, functools.partial(self._left_out, names, name))

    def _stage(self, row: str, measure: Any) -> None:
        """Put the row that `measure` returns on record as a stage, or take it from there unless it failed."""
        stage = f"{self.bench.id}.{row}"
        if self.session.ledger.is_measured(stage):
            known = self.session.ledger[stage].benchmarks[0].rows
            self.rows += known
            for found in known:
                self.largest_left -= found.get("largest_s", 0.0)
                self.largest_batch = found.get("largest_batch", self.largest_batch)
            return
        began = time.perf_counter()
        result = BenchmarkResult(stage, self.config.type)
        try:
            found = measure()
        except (ConfigError, KernelUnavailable, OutOfMemory) as error:  # what the device or the model has not
            found = self._words(row) | {"skipped": str(error)}
        except Exception as error:  # recorded in report.json and reported as exit status 1 by the worker
            logger.error(f"{stage}: {type(error).__name__}: {error}")
            result = dataclasses.replace(result, error=f"{type(error).__name__}: {error}")
            found = None
        release_memory()
        if found is not None:
            self._say(stage, found)
            self.rows.append(found)
            result = dataclasses.replace(result, rows=(found,), metrics=self._metrics(found))
            if found["skipped"] is None:
                self._strike_behind(row)
        self.session.ledger.put_row(dataclasses.replace(result, seconds=time.perf_counter() - began))

    def _strike_behind(self, row: str) -> None:
        """Strike rows on record that were measured without this one, which had failed: each rung builds on those before
        it, and the noise is of all twins. They go first: a kill then leaves a failure, which is tried again."""
        ledger, stage = self.session.ledger, f"{self.bench.id}.{row}"
        is_twin = row.startswith(TWIN)
        if stage not in ledger or row == "largest_batch" or not (is_twin or row in self.config.rows):
            return
        kinds = (TWIN,) if is_twin else (TWIN, LEFT_OUT)
        listed = [record.phase.id for record in ledger.records()]
        for other in listed[listed.index(stage) + 1 :]:
            bench, _, name = other.rpartition(".")
            if bench == self.bench.id and (name.startswith(kinds) or (not is_twin and name in self.config.rows)):
                ledger.remove(other)

    def _words(self, row: str) -> Row:
        if row.startswith(TWIN):
            what = f"top again, weights moved by one ulp ({row.removeprefix(TWIN)})"
            return {"model": self.model, "row": row, "what": what, "skipped": None}
        left_out = row.removeprefix(LEFT_OUT)
        what = RUNGS[left_out].what  # type: ignore[index]
        if left_out != row:
            what = f"top without {what.removeprefix('+ ')}"
        return {"model": self.model, "row": row, "what": what, "skipped": None}

    def _row(self, name: RowName) -> Row:
        names: list[RowName] = [*self.on, name]
        if name == "kernels" and not self._has_kernels():
            raise ConfigError(f"no op has a kernel on {self.session.device.type} here")
        config = self.config
        steps = self._steps(names, row_keys(names), config.loss_steps)
        measured, taken = self._measured(steps, self.fresh())
        found = self._words(name) | measured
        if config.largest:
            try:
                found |= self._largest(name, steps, taken if measured["accumulation"] == 1 else None)
            except (ConfigError, KernelUnavailable, OutOfMemory) as error:  # the fixed batch's figures stand
                found["largest_skipped"] = str(error)
        return found

    def _twin(self, top: list[RowName], twin: int) -> Row:
        """Train the top again from weights moved by one unit in the last place, with other draws: its loss's noise."""
        steps = self._steps(top, row_keys(top), self.config.loss_steps)
        words = self._words(f"{TWIN}{twin}") | {"of_row": top[-1]}
        found = words | self._measured(dataclasses.replace(steps, twin=twin), self.fresh())[0]
        alike = [row for row in self.rows if row["row"] == top[-1] or row.get("of_row") == top[-1]]
        known = (row.get("val_loss") for row in (*alike, found))
        losses = [float(loss) for loss in known if loss is not None]
        return found | {"loss_noise": statistics.stdev(losses), "loss_runs": len(losses)}

    def _left_out(self, top: list[RowName], name: RowName) -> Row:
        names: list[RowName] = [other for other in top if other != name]
        steps = self._steps(names, without(top, name), self.config.warmup_steps + self.config.timed_steps)
        return self._words(LEFT_OUT + name) | {"of_row": top[-1]} | self._measured(steps, None)[0]

    def _steps(self, names: Sequence[RowName], keys: dict[str, Any], n_steps: int) -> LadderSteps:
        return LadderSteps(
            keys,
            "flash" in names,
            "kernels" in names,
            self.config.batch_size,
            self.config.gradient_accumulation_steps,
            n_steps,
        )

    def _has_kernels(self) -> bool:
        attached = kernels.load(self.session.device, self.session.manifest.kernels)
        return any(backend != REFERENCE for backend in attached.values())

    def fresh(self) -> Model:
        """The weights that every row begins with, on the host: drawing them takes seconds, copying them less."""
        if self._fresh is None:
            self._fresh = build_model(self.spec, seed=self.session.manifest.seed)
        return self._fresh

    def _measured(self, steps: LadderSteps, fresh: Model | None) -> tuple[Row, Taken]:
        """Take a row's steps, with half the batch twice where memory runs out, and compare with the first row."""
        while True:
            try:
                taken = take_steps(self.session, self.config, self.spec, steps, fresh=fresh)
                break
            except OutOfMemory:
                if steps.batch_size % 2:
                    raise
            release_memory()
            steps = dataclasses.replace(steps, batch_size=steps.batch_size // 2, accumulation=2 * steps.accumulation)
        config = self.config
        timed = taken.seconds[config.warmup_steps :][: config.timed_steps]
        tokens = steps.batch_size * steps.accumulation * config.block_size
        step_s, p20, p80 = spread(timed)
        found: Row = {
            "batch_size": steps.batch_size,
            "accumulation": steps.accumulation,
            "block_size": config.block_size,
            "timed_steps": len(timed),
            "step_ms": 1e3 * step_s,
            "step_ms_p20": 1e3 * p20,
            "step_ms_p80": 1e3 * p80,
            "tok_s": tokens / step_s,
            "mfu": taken.mfu_per_tok_s and taken.mfu_per_tok_s * tokens / step_s,
            "start_s": max(0.0, sum(taken.seconds[: config.warmup_steps]) - config.warmup_steps * step_s),
            "peak_bytes": taken.peak_bytes,
            "peak_allocated_bytes": taken.peak_allocated_bytes,
            "train_loss": taken.train_loss,
            "val_loss": taken.val_loss,
        }
        first = self.first() or found
        found["speed_up"] = found["tok_s"] / first["tok_s"]
        found["memory_ratio"] = found["peak_bytes"] / max(1, first["peak_bytes"])
        if taken.val_loss is not None:
            found["val_loss_delta"] = taken.val_loss - first["val_loss"]
        return found, taken

    def first(self) -> Row | None:
        """The row that others are compared with."""
        return next((row for row in self.rows if row["skipped"] is None), None)

    def _largest(self, name: RowName, steps: LadderSteps, taken: Taken | None) -> Row:
        """Find the largest batch of a row, for its share of the seconds that are left, and how fast it is there."""
        if self.largest_left <= 0:
            return {"largest_skipped": f"largest_seconds={self.config.largest_seconds} were used up before it"}
        others = [row for row in self.config.rows if row != "largest_batch"]
        seconds = self.largest_left / (len(others) - others.index(name))
        found = find_largest(
            self.session,
            self.config,
            self.spec,
            steps,
            taken=taken,
            first=self.largest_batch,
            seconds=seconds,
        )
        self.largest_left -= found.budget.spent
        if found.best is not None:
            self.largest_batch = found.best.candidate.batch_size
        return largest_row(found, self.config.block_size, self.first())

    def _best_of_largest(self, name: RowName) -> Row:
        """Repeat the figures of the row that is `fastest` at its largest batch."""
        best, first = fastest(self.rows, "largest_tok_s", "largest_peak_bytes"), self.first()
        if best is None or first is None:
            raise ConfigError("no row found a batch that fits")
        return self._words(name) | {
            "of_row": best["row"],
            "largest_ended": best.get("largest_ended"),
            "batch_size": best["largest_batch"],
            "accumulation": 1,
            "block_size": self.config.block_size,
            "tok_s": best["largest_tok_s"],
            "step_ms": 1e3 * best["largest_batch"] * self.config.block_size / best["largest_tok_s"],
            "peak_bytes": best["largest_peak_bytes"],
            "speed_up": best["largest_tok_s"] / first["tok_s"],
            "memory_ratio": best["largest_peak_bytes"] / max(1, first["peak_bytes"]),
        }

    def _metrics(self, row: Row) -> tuple[Metric, ...]:
        if row["skipped"] is not None:
            return ()
        given = f"row={row['row']},batch={row['batch_size']},accumulate={row['accumulation']}"
        return tuple(
            Metric(
                f"ladder.{self.model}.{field}@{given},block={row['block_size']}",
                float(row[field]),
                unit,
                row.get(REPEATS.get(field, "")),
                None,
                self.bench.id,
            )
            for field, unit in UNITS.items()
            if row.get(field) is not None
        )

    def _say(self, stage: str, row: Row) -> None:
        if row["skipped"] is not None:
            logger.warning(f"{stage}: skipped, {row['skipped']}")
            return
        words = [
            f"{row['tok_s']:,.0f} tokens/s ({row['speed_up']:.2f}x)",
            f"{row['peak_bytes'] / 2**30:.2f} GiB",
        ]
        if row.get("val_loss") is not None:
            words.append(f"held-out loss {row['val_loss']:.4f} ({row['val_loss_delta']:+.4f})")
        if row.get("loss_noise") is not None:
            words.append(f"loss noise {row['loss_noise']:.4f} of {row['loss_runs']} runs")
        if "largest_batch" in row:
            at = f"batch {row['largest_batch']}, ended by {row['largest_ended']}"
            words.append(f"{row['largest_tok_s']:,.0f} tokens/s at {at}")
        logger.info(f"{stage}: {', '.join(words)}")


def climb_ladder(session: Session, bench: BenchmarkConfig) -> None:
    """Measure a training ladder with the session's own models off its device.

    A finished row is never repeated, and one that failed is tried again."""
    logger.subheader(f"ladder: {bench.id}")
    roles = [role for role in ("student", "teacher") if getattr(session, role) is not None]
    role = next((role for role in roles if role in bench.models), None)
    if role is None:
        if bench.id not in session.ledger:
            error = f"models={list(bench.models)}, and this run has the {' and '.join(roles)} alone; name that"
            logger.error(f"{bench.id}: {error}")
            session.ledger.put_row(BenchmarkResult(bench.id, bench.config.type, error=error))
        return
    ladder = Ladder(session, bench, role)
    models = [model for model in (session.teacher, session.student) if model is not None]
    for model in models if session.device.type != "cpu" else []:
        model.to("cpu")
    try:
        ladder.climb()
    finally:
        session.move_to(session.device)
