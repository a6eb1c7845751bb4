"""The table of optimisers: each row searches its rate, then trains over several orders of the data."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from caramba.config.benchmark import ROW_KEYS, ROW_LR, BenchmarkConfig, OptimizersConfig
from caramba.config.optimizer import DEFAULT_STRATEGIES, STRATEGIES, StrategyConfig, trial_steps
from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.data import batches, spread_windows
from caramba.errors import CarambaError
from caramba.experiment.objectives import build_objective, frozen_teacher
from caramba.experiment.session import Session
from caramba.experiment.stages import fit_apart
from caramba.model import Model, build_model
from caramba.result import BenchmarkResult, Metric
from caramba.runs.files import write_json
from caramba.runtime import RuntimePlan
from caramba.train.orchestration.build import Orchestration
from caramba.train.orchestration.policies import compute_interval
from caramba.train.orchestration.trials import mean_loss

FILE = "optimizers.json"
ORCHESTRATED = ("nowcast", "orchestrator")
SMOOTHED = 20
POINTS = 50
SCORED_AT_ONCE = 8
SEARCH_SEED = 1000
"""Order of the data by which rates are searched."""
Row = dict[str, Any]


class NoTimeLeftError(CarambaError):
    """What is left of the table's time does not hold the runs that come next."""


class Losses(pl.Callback):
    """Training loss and seconds of every step; on a CPU those of the process, which other work does not lengthen."""

    def __init__(self, device: torch.device) -> None:
        self.found: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.device = device
        self.clock = time.process_time if device.type == "cpu" else time.perf_counter

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.began, self.began_wall = self.clock(), time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(outputs["loss"].detach().clone())
        self.seconds.append(self.clock() - self.began)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.device.type == "cuda":  # whose steps end after their launches
            torch.cuda.synchronize(self.device)
            self.seconds[-1] = self.clock() - self.began
        self.wall = time.perf_counter() - self.began_wall

    def smooth(self) -> list[float]:
        """Return the mean loss of the last steps, at every step."""
        values = [float(loss) for loss in self.found]
        return [statistics.fmean(values[max(0, at - SMOOTHED + 1) : at + 1]) for at in range(len(values))]


class TrialsWithin(pl.Callback):
    """Ends a run whose trials have cost more than `most` steps."""

    def __init__(self, most: int) -> None:
        self.most, self.is_exceeded = most, False

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        for one in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue] Lightning sets it later
            if isinstance(one, Orchestration) and one.orchestrator.trial_steps > self.most:
                self.is_exceeded = trainer.should_stop = True


class OptimizerTable:
    """One table of a session: its rows so far, AdamW's first."""

    def __init__(self, session: Session, bench: BenchmarkConfig, role: str) -> None:
        assert isinstance(bench.config, OptimizersConfig)
        self.session, self.bench, self.config, self.role = session, bench, bench.config, role
        self.spec = session.model_of(role).spec
        self.rows: list[Row] = []
        self.began = time.perf_counter()
        self.took: dict[str, list[tuple[float, float]]] = {}
        """Seconds of each row's runs around their training, and of a step."""
        self._model: Model | None = None
        self._teacher: Model | None = None

    @property
    def measured(self) -> list[Row]:
        """The rows that were not left out, AdamW's first."""
        return [row for row in self.rows if row["skipped"] is None]

    def need_time(self, row: str, *steps: int) -> None:
        """Check that runs of a row, each of so many steps, would end in time.

        They are taken to be as the row's fastest, or as AdamW's before its second: a first one may compile kernels.

        Raises:
            NoTimeLeftError: they would not.
        """
        limit = self.config.seconds
        known = [self.took.get(name, []) for name in (row, "adamw")]
        runs = next((one for one in known if len(one) > 1), None)
        if limit is None or runs is None:
            return
        around, per_step = map(min, zip(*runs, strict=True))
        needed = len(steps) * around + sum(steps) * per_step
        left = max(0.0, limit - (time.perf_counter() - self.began))
        if needed > left:
            raise NoTimeLeftError(
                f"{row} takes about {needed:.0f} s more, and {left:.0f} s of seconds={limit:g} are left"
            )

    def phase_of(self, row: str, rate: float, steps: int, *, repeats: int | None = None) -> PhaseConfig:
        """Return a row's phase of `steps` steps, trials included; `rate` is a multiple of the row's own.

        Trials leave room for `repeats` of a decision's, all by default.
        """
        config = self.config
        keys: dict[str, Any] = {
            "phase": "pretrain" if config.objective == "ce" else "global",
            "objective": config.objective,
            "trains": self.role,
            "steps": steps,
            "batch_size": config.batch_size,
            "block_size": config.block_size,
            "lr": config.lr * ROW_LR.get(row, 1.0) * rate,
            "weight_decay": config.weight_decay,
            "warmup_steps": steps // 20,
            "min_lr_ratio": 0.02,
            "dtype": config.dtype,
            "compile_model": config.compile,
            **ROW_KEYS.get(row, {}),
        }
        if row not in ORCHESTRATED:
            return PhaseConfig.model_validate({**keys, "optimizer": row})
        keys |= self._orchestrator_keys(row, steps)
        own, cost = self._own_steps(row, steps)
        if not self._holds_decision(own, cost, steps):
            raise CarambaError(
                f"{self.bench.id}: {row} decides after {self._interval_of(steps)} steps and a decision takes {cost}, "
                f"which steps={steps} do not hold; raise steps, or lower eval_horizon or repeats"
            )
        budget = steps - own
        if repeats is not None:
            own += (cost - self._cost(row, steps, repeats)) * (budget // cost)
        keys |= {"steps": own, "warmup_steps": own // 20}
        return PhaseConfig.model_validate({**keys, "orchestrator_budget": min(1.0, (budget + 0.5) / own)})

    def _strategies(self) -> dict[str, StrategyConfig]:
        return self.config.strategies or {name: STRATEGIES[name] for name in DEFAULT_STRATEGIES}

    def _interval_of(self, steps: int) -> int:
        own = PhaseConfig.model_fields["orchestrator_decision_interval"].default
        return self.config.decision_interval or max(1, min(own, steps // 4))

    def _orchestrator_keys(self, row: str, steps: int) -> dict[str, Any]:
        config, interval = self.config, self._interval_of(steps)
        names = self._strategies()
        if row == "nowcast":
            names = {"conservative_adamw": STRATEGIES["conservative_adamw"]}
        return {
            "orchestrator_enabled": True,
            "orchestrator_strategies": names,
            "orchestrator_initial_strategy": next(iter(names)),
            "orchestrator_decision_interval": interval,
            "orchestrator_eval_horizon": config.eval_horizon,
            "orchestrator_repeats": config.repeats,
            "orchestrator_min_steps_between_switches": interval,
            "orchestrator_ramp_steps": min(50, interval),
            "orchestrator_use_nowcasting": row == "nowcast",
        }

    def _own_steps(self, row: str, steps: int) -> tuple[int, int]:
        """Return the steps of `steps` that a row's trials leave, and those of one decision."""
        cost = self._cost(row, steps, self.config.repeats)
        held = (steps - 1) // (self._interval_of(steps) + cost)
        decisions = max(1, min(held, steps // (2 * cost), self.config.decisions or held))
        return steps - decisions * cost, cost

    def _cost(self, row: str, steps: int, repeats: int) -> int:
        """Return the steps of one decision with so many repeats."""
        keys = {"phase": "pretrain", "lr": 1.0, "batch_size": 1, "block_size": 1, "orchestrator_budget": 1.0}
        phase = PhaseConfig.model_validate({**keys, **self._orchestrator_keys(row, steps), "steps": 10**9})
        return trial_steps(phase.model_copy(update={"orchestrator_repeats": repeats}))

    def _holds_decision(self, own: int, cost: int, steps: int) -> bool:
        """Whether a boundary is among a run's own steps, and its trials within their largest budget."""
        return own > self._interval_of(steps) and own >= cost

    def train(self, row: str, rate: float, steps: int, seed: int) -> Row:
        """Train a model and return its held-out loss and what it took.

        Trials that end after one pair cost a third of those that switch. How long the run's own steps may be is so
        known only after a decision: a run that has left too little room for it begins again with all of it.
        """
        found = self._train(row, rate, steps, seed, repeats=1) if row in ORCHESTRATED else None
        if found is None:
            found = self._train(row, rate, steps, seed)
        assert found is not None
        return found

    def _train(self, row: str, rate: float, steps: int, seed: int, *, repeats: int | None = None) -> Row | None:
        """Train a run; None if trials have taken more than there was left for `repeats` of them."""
        session, config = self.session, self.config
        began = time.perf_counter()
        phase = self.phase_of(row, rate, steps, repeats=repeats)
        plan = session.plan(phase, "optimizers", self.spec.embedder.d_model)
        model = self._fresh_model(seed)
        sharer = dataclasses.replace(session, teacher=self._teacher_of(plan))
        losses, within = Losses(session.device), TrialsWithin(steps - phase.steps)
        with tempfile.TemporaryDirectory() as name:
            outcome = fit_apart(
                sharer,
                phase,
                plan,
                model,
                Path(name),
                seed=session.manifest.seed + seed,
                callbacks=[losses, within],
            )
            file = Path(name) / "decisions.jsonl"
            lines = file.read_text().splitlines() if file.is_file() else []
        self._model = model
        if within.is_exceeded:
            return None
        per_step = config.batch_size * config.block_size
        loss = self._held_out(phase, model, 0 if seed == SEARCH_SEED else 1)
        curve, every = losses.smooth(), max(1, phase.steps // POINTS)
        around = time.perf_counter() - began - losses.wall
        self.took.setdefault(row, []).append((around, losses.wall / steps))
        return {
            "seed": seed,
            "steps": outcome.steps,
            "trial_steps": int(outcome.measured.get("trial_steps", 0)),
            "tokens": (outcome.steps + int(outcome.measured.get("trial_steps", 0))) * per_step,
            "seconds": losses.seconds[-1],
            "loss": loss,
            "train_loss": curve[-1],
            "curve": [
                {"tokens": (at + 1) * per_step, "seconds": losses.seconds[at], "loss": curve[at]}
                for at in range(every - 1, len(curve), every)
            ],
            "decisions": [json.loads(line) for line in lines],
        }

    def _fresh_model(self, seed: int) -> Model:
        """Return the model that a run trains, as every run begins: one module for all, which is compiled once.

        A run that fails leaves nothing: it may have been lowered or compiled.
        """
        session, kept = self.session, self._model
        self._model = None
        if self.config.objective == "ce":
            first = build_model(self.spec, seed=seed)
        else:
            first = session.model_of(self.role)
        if kept is None:
            kept = copy.deepcopy(first).to(session.device)
        else:
            kept.zero_grad(set_to_none=True)
            kept.load_state_dict(first.state_dict())
        return kept.train()

    def _teacher_of(self, plan: RuntimePlan) -> Model | None:
        """Return the session's teacher, of a distillation in what it computes in, made once."""
        if self.config.objective == "ce":
            return self.session.teacher
        if self._teacher is None:
            self._teacher = frozen_teacher(self.session, plan)
        return self._teacher

    def _held_out(self, phase: PhaseConfig, model: Model, half: int) -> float:
        """Return a model's mean loss in float32 on a half of the held-out windows."""
        session = self.session
        plain = phase.model_copy(update={"dtype": "float32"})
        decided = session.plan(plain, "optimizers", self.spec.embedder.d_model)
        objective = build_objective(session, plain, decided, model.float().eval())
        windows = session.windows("val", self.config.block_size)
        indices = spread_windows(len(windows), self.config.val_windows)
        return mean_loss(objective, batches(windows, indices[half::2], SCORED_AT_ONCE), session.device)

    def search(self, row: str) -> list[Row]:
        """Return a row's rates, each with its loss after `search_steps`; AdamW's where a row begins with it."""
        config = self.config
        steps = config.search_steps or config.steps
        if config.search_steps and row in ORCHESTRATED:
            return self.rows[0]["rates"]
        tried: list[Row] = []
        failure: CarambaError | None = None
        for at, rate in enumerate(config.rates):
            self.need_time(row, *[steps] * (len(config.rates) - at), *[config.steps] * config.seeds)
            one: Row = {"rate": rate, "lr": config.lr * ROW_LR.get(row, 1.0) * rate}
            try:
                one["loss"] = self.train(row, rate, steps, SEARCH_SEED)["loss"]
            except CarambaError as error:  # it has diverged; the row fails if all of its rates do
                one |= {"loss": None, "error": str(error)}
                failure = error
            tried.append(one)
        if failure is not None and all(one["loss"] is None for one in tried):
            raise failure
        return tried

    def measure(self, row: str) -> Row:
        """Search a row's rate, train it over the seeds and compare it with AdamW."""
        config = self.config
        tried = self.search(row)
        sound = [one for one in tried if one["loss"] is not None and math.isfinite(one["loss"])]
        best = min(sound or tried, key=lambda one: one["loss"])
        runs = []
        for seed in range(config.seeds):
            self.need_time(row, *[config.steps] * (config.seeds - seed))
            runs.append(self.train(row, best["rate"], config.steps, seed))
        losses = [run["loss"] for run in runs]
        found: Row = {
            "model": self.role,
            "row": row,
            "skipped": None,
            "rates": tried,
            "lr": best["lr"],
            "is_edge": best["rate"] in (min(config.rates), max(config.rates)) and len(config.rates) > 1,
            "val_loss": statistics.fmean(losses),
            "val_loss_deviation": statistics.stdev(losses),
            "seconds": statistics.fmean(run["seconds"] for run in runs),
            "tokens": max(run["tokens"] for run in runs),
            "trial_tokens": max(run["trial_steps"] for run in runs) * config.batch_size * config.block_size,
            "runs": runs,
        }
        others = (found if row == "adamw" else self.rows[0])["runs"]
        found["loss_difference"] = _difference(runs, others)
        found["tokens_to_adamw"] = [
            _tokens_to(ours, theirs["train_loss"]) for ours, theirs in zip(runs, others, strict=True)
        ]
        return found

    def measure_time(self, row: Row) -> Row:
        """Return a row's differences from runs of AdamW that take its seconds, and from its best fixed strategy."""
        runs, difference = self._for_the_seconds_of(row, self.rows[0])
        return {"adamw_at_equal_time": runs, "loss_difference_at_equal_time": difference}

    def _best_fixed(self) -> Row | None:
        """Return the row with the lowest loss of those whose optimiser the orchestrator's portfolio holds."""
        held = {one.optimizer for one in self._strategies().values()}
        fixed = [row for row in self.measured if row["row"] in held]
        return min(fixed, key=lambda row: row["val_loss"], default=None)

    def compare_with_fixed(self, row: Row) -> Row:
        """Return the orchestrator's differences from the best fixed row."""
        best = self._best_fixed()
        assert best is not None
        return {"best_fixed": best["row"], "best_fixed_difference": _difference(row["runs"], best["runs"])}

    def time_fixed(self, row: Row) -> Row:
        """Return the orchestrator's differences from runs of the best fixed row that take its seconds."""
        if row["best_fixed"] == "adamw":
            runs, difference = row["adamw_at_equal_time"], row["loss_difference_at_equal_time"]
        else:
            best = next(one for one in self.measured if one["row"] == row["best_fixed"])
            runs, difference = self._for_the_seconds_of(row, best)
        return {"best_fixed_at_equal_time": runs, "best_fixed_difference_at_equal_time": difference}

    def _for_the_seconds_of(self, row: Row, other: Row) -> tuple[list[Row], dict[str, float]]:
        """Train `other`, a row of a fixed optimiser, for as long as each run of `row` took, and compare them."""
        steps = [
            max(20, round(self.config.steps * ours["seconds"] / theirs["seconds"]))
            for ours, theirs in zip(row["runs"], other["runs"], strict=True)
        ]
        runs: list[Row] = []
        for at, ours in enumerate(row["runs"]):
            self.need_time(other["row"], *steps[at:])
            run = self.train(other["row"], self._rate_of(other), steps[at], ours["seed"])
            runs.append({key: run[key] for key in ("seed", "steps", "seconds", "loss")})
        return runs, _difference(row["runs"], runs)

    def _rate_of(self, row: Row) -> float:
        return next(one["rate"] for one in row["rates"] if one["lr"] == row["lr"])

    def _stage(self, row: str) -> None:
        """Put a row on record as a stage, or take it from there unless it failed or was left out."""
        stage = f"{self.bench.id}.{row}"
        if self.session.ledger.is_measured(stage):
            (kept,) = self.session.ledger[stage].benchmarks[0].rows
            if kept["skipped"] is None:
                self.rows.append(kept)
                return
        began = time.perf_counter()
        error, found = None, None
        try:
            found = self.measure(row)
        except NoTimeLeftError as short:
            logger.warning(f"{stage}: left out, {short}")
            found = {"model": self.role, "row": row, "skipped": str(short)}
        except Exception as failure:  # recorded in report.json and reported as exit status 1 by the worker
            error = f"{type(failure).__name__}: {failure}"
            logger.error(f"{stage}: {error}")
        else:
            low, high = found["loss_difference"]["low"], found["loss_difference"]["high"]
            logger.info(
                f"{stage}: held-out loss {found['val_loss']:.4f}, against AdamW {low:+.4f} to {high:+.4f}, lr "
                f"{found['lr']:g}"
            )
        if found is not None:
            self.rows.append(found)
        self._record(stage, found, time.perf_counter() - began, error)

    def _add(self, row: Row, measure: Callable[[Row], Row]) -> None:
        """Add what `measure` finds of a row to its stage, or the reason why it was left out."""
        stage = f"{self.bench.id}.{row['row']}"
        began, error = time.perf_counter(), None
        try:
            row |= measure(row)
        except NoTimeLeftError as short:
            logger.warning(f"{stage}: equal time left out, {short}")
            row["equal_time_skipped"] = str(short)
        except Exception as failure:  # as of a row
            error = f"{type(failure).__name__}: {failure}"
            logger.error(f"{stage}: {error}")
        earlier = self.session.ledger[stage].phase.seconds
        self._record(stage, row, earlier + time.perf_counter() - began, error)
        self._write()

    def _record(self, stage: str, row: Row | None, seconds: float, error: str | None) -> None:
        rows = () if row is None else (row,)
        metrics = () if row is None or row["skipped"] is not None else self._metrics(row)
        self.session.ledger.put_row(BenchmarkResult(stage, self.config.type, metrics, rows, error, seconds))

    def _metrics(self, row: Row) -> tuple[Metric, ...]:
        n = self.config.seeds
        values = {
            "val_loss": (row["val_loss"], "nats/token"),
            "val_loss_deviation": (row["val_loss_deviation"], "nats/token"),
            "loss_difference": (row["loss_difference"]["mean"], "nats/token"),
            "lr": (row["lr"], "1"),
            "seconds": (row["seconds"], "s"),
        }
        differences = {
            "time_difference": "loss_difference_at_equal_time",
            "best_fixed_difference": "best_fixed_difference",
            "best_fixed_time_difference": "best_fixed_difference_at_equal_time",
        }
        for field, key in differences.items():
            if key in row:
                values[field] = (row[key]["mean"], "nats/token")
        return tuple(
            Metric(f"optimizers.{self.role}.{field}@row={row['row']}", value, unit, n, None, self.bench.id)
            for field, (value, unit) in values.items()
        )

    def run(self) -> None:
        """Measure every row that is not on record yet, then equal time; optimizers.json is written after each.

        The orchestrator's comparisons do not wait for rows that they do not need, should time run out.
        """
        held = {one.optimizer for one in self._strategies().values()}
        for at, name in enumerate(self.config.rows):
            self._stage(name)
            if not self.measured or self.measured[0]["row"] != "adamw":
                return
            self._write()
            if held.isdisjoint(self.config.rows[at + 1 :]):
                for row in self.measured:
                    if row["row"] == "orchestrator":
                        self._compare(row)
        for row in self.measured[1:]:
            self._compare(row)

    def _compare(self, row: Row) -> None:
        """Add the comparisons that a row lacks yet, until one fails or there is no time for it."""
        wanted: list[tuple[str, Callable[[Row], Row]]] = []
        if row["row"] == "orchestrator" and self._best_fixed() is not None:
            wanted.append(("best_fixed", self.compare_with_fixed))
        if self.config.equal_time:
            wanted.append(("adamw_at_equal_time", self.measure_time))
            wanted += [("best_fixed_at_equal_time", self.time_fixed) for _ in wanted[:-1]]
        for key, measure in wanted:
            is_sound = self.session.ledger.is_measured(f"{self.bench.id}.{row['row']}")
            if is_sound and key not in row and "equal_time_skipped" not in row:
                self._add(row, measure)

    def _write(self) -> None:
        settings = self.config.model_dump(mode="json")
        write_json(self.session.run_dir / FILE, {"settings": settings, "rows": self.rows})


def _difference(runs: list[Row], others: list[Row]) -> dict[str, float]:
    """Return the interval of the differences in loss of runs from others of the same seeds."""
    differences = [ours["loss"] - theirs["loss"] for ours, theirs in zip(runs, others, strict=True)]
    found = compute_interval(differences)
    return {"mean": found.mean, "low": found.low, "high": found.high, "n": len(differences)}


def _tokens_to(run: Row, loss: float) -> int | None:
    """Return the tokens after which a run's smoothed training loss is that; None if it never is."""
    return next((point["tokens"] for point in run["curve"] if point["loss"] <= loss), None)


def measure_optimizers(session: Session, bench: BenchmarkConfig) -> None:
    """Measure a table of optimisers with models of the session's own architecture."""
    logger.subheader(f"optimizers: {bench.id}")
    roles = [role for role in ("student", "teacher") if getattr(session, role) is not None]
    role = next((role for role in roles if role in bench.models), roles[0])
    OptimizerTable(session, bench, role).run()
