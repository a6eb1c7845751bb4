"""The table of optimisers: each row searches its rate, then trains over several orders of the data."""

from __future__ import annotations

import copy
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from caramba.config.benchmark import ROW_KEYS, ROW_LR, BenchmarkConfig, OptimizersConfig
from caramba.config.optimizer import STRATEGIES, trial_steps
from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.data import batches, spread_windows
from caramba.errors import CarambaError
from caramba.experiment.fit_apart import fit_apart
from caramba.experiment.objectives import build_objective
from caramba.experiment.session import Session, StageRecord
from caramba.model import Model, build_model
from caramba.result import BenchmarkResult, Metric, PhaseResult
from caramba.runs.files import write_json
from caramba.train.orchestration.interval import compute_interval
from caramba.train.orchestration.trials import mean_loss

FILE = "optimizers.json"
ORCHESTRATED = ("nowcast", "orchestrator")
SMOOTHED = 20
POINTS = 50
SCORED_AT_ONCE = 8
Row = dict[str, Any]


class Losses(pl.Callback):
    """Training loss and seconds of every step; on a CPU those of the process, which other work does not lengthen."""

    def __init__(self, device: torch.device) -> None:
        self.found: list[torch.Tensor] = []
        self.seconds: list[float] = []
        self.clock = time.process_time if device.type == "cpu" else time.perf_counter

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.began = self.clock()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.found.append(outputs["loss"].detach().clone())
        self.seconds.append(self.clock() - self.began)

    def smooth(self) -> list[float]:
        """Return the mean loss of the last steps, at every step."""
        values = [float(loss) for loss in self.found]
        return [statistics.fmean(values[max(0, at - SMOOTHED + 1) : at + 1]) for at in range(len(values))]


class OptimizerTable:
    """One table of a session: its rows so far, AdamW's first."""

    def __init__(self, session: Session, bench: BenchmarkConfig, role: str) -> None:
        assert isinstance(bench.config, OptimizersConfig)
        self.session, self.bench, self.config, self.role = session, bench, bench.config, role
        self.spec = session.model_of(role).spec
        self.rows: list[Row] = []

    def phase_of(self, row: str, rate: float, steps: int) -> PhaseConfig:
        """Return a row's phase of `steps` steps, trials included; `rate` is a multiple of the row's own."""
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
            **ROW_KEYS.get(row, {}),
        }
        if row not in ORCHESTRATED:
            return PhaseConfig.model_validate({**keys, "optimizer": row})
        names = config.strategies or {
            name: STRATEGIES[name] for name in ("conservative_adamw", "muon", "lion")
        }
        if row == "nowcast":
            names = {"conservative_adamw": STRATEGIES["conservative_adamw"]}
        interval = config.decision_interval or max(1, steps // 4)
        keys |= {
            "orchestrator_enabled": True,
            "orchestrator_strategies": names,
            "orchestrator_initial_strategy": next(iter(names)),
            "orchestrator_decision_interval": interval,
            "orchestrator_eval_horizon": config.eval_horizon,
            "orchestrator_repeats": config.repeats,
            "orchestrator_min_steps_between_switches": interval,
            "orchestrator_ramp_steps": min(50, interval),
            "orchestrator_use_nowcasting": row == "nowcast",
            "orchestrator_budget": 1.0,
        }
        # The trials of its decisions are steps that it does not train.
        cost = trial_steps(PhaseConfig.model_validate(keys))
        decisions = min(max(1, (steps - 1) // (interval + cost)), config.decisions or steps)
        own = steps - decisions * cost
        if own <= interval:
            raise CarambaError(
                f"{self.bench.id}: {row} decides after {interval} steps and a decision takes {cost}, which steps="
                f"{steps} do not hold; raise steps, or lower eval_horizon or repeats"
            )
        budget = decisions * cost / own
        return PhaseConfig.model_validate(
            {**keys, "steps": own, "warmup_steps": own // 20, "orchestrator_budget": min(1.0, budget)}
        )

    def train(self, row: str, rate: float, steps: int, seed: int) -> Row:
        """Train a model and return its losses on both halves of the held-out windows, and what it took."""
        session, config = self.session, self.config
        phase = self.phase_of(row, rate, steps)
        plan = session.plan(phase, "optimizers", self.spec.embedder.d_model)
        if config.objective == "ce":
            model = build_model(self.spec, seed=seed)
        else:
            model = copy.deepcopy(session.model_of(self.role))
        model = model.to(session.device).train()
        losses = Losses(session.device)
        with tempfile.TemporaryDirectory() as name:
            outcome = fit_apart(
                session, phase, plan, model, Path(name), seed=session.manifest.seed + seed, callbacks=[losses]
            )
            file = Path(name) / "decisions.jsonl"
            lines = file.read_text().splitlines() if file.is_file() else []
        per_step = config.batch_size * config.block_size
        halves = self._held_out(phase, model)
        curve, every = losses.smooth(), max(1, phase.steps // POINTS)
        return {
            "seed": seed,
            "steps": outcome.steps,
            "trial_steps": int(outcome.measured.get("trial_steps", 0)),
            "tokens": (outcome.steps + int(outcome.measured.get("trial_steps", 0))) * per_step,
            "seconds": losses.seconds[-1],
            "search_loss": halves[0],
            "loss": halves[1],
            "train_loss": curve[-1],
            "curve": [
                {"tokens": (at + 1) * per_step, "seconds": losses.seconds[at], "loss": curve[at]}
                for at in range(every - 1, len(curve), every)
            ],
            "decisions": [json.loads(line) for line in lines],
        }

    def _held_out(self, phase: PhaseConfig, model: Model) -> list[float]:
        """Return a model's mean losses in float32 on both halves of the held-out windows."""
        session = self.session
        plain = phase.model_copy(update={"dtype": "float32"})
        decided = session.plan(plain, "optimizers", self.spec.embedder.d_model)
        objective = build_objective(session, plain, decided, model.float().eval())
        windows = session.windows("val", self.config.block_size)
        indices = spread_windows(len(windows), self.config.val_windows)
        return [
            mean_loss(objective, batches(windows, indices[half::2], SCORED_AT_ONCE), session.device)
            for half in (0, 1)
        ]

    def measure(self, row: str) -> Row:
        """Search a row's rate, train it over the seeds and compare it with AdamW."""
        config = self.config
        tried = []
        for rate in config.rates:
            one = self.train(row, rate, config.search_steps or config.steps, 1000)
            tried.append(
                {"rate": rate, "lr": config.lr * ROW_LR.get(row, 1.0) * rate, "loss": one["search_loss"]}
            )
        known = [one for one in tried if one["loss"] == one["loss"]]
        best = min(known or tried, key=lambda one: one["loss"])
        runs = [self.train(row, best["rate"], config.steps, seed) for seed in range(config.seeds)]
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
        first = found if row == "adamw" else self.rows[0]
        pairs = list(zip(runs, first["runs"], strict=True))
        found["loss_difference"] = _interval([ours["loss"] - theirs["loss"] for ours, theirs in pairs])
        found["tokens_to_adamw"] = [_tokens_to(ours, theirs["train_loss"]) for ours, theirs in pairs]
        if config.equal_time and row != "adamw":
            longer = []
            for ours, theirs in pairs:
                steps = max(20, round(config.steps * ours["seconds"] / theirs["seconds"]))
                rate = first["lr"] / config.lr
                longer.append(self.train("adamw", rate, steps, ours["seed"]))
            found["adamw_at_equal_time"] = [
                {key: run[key] for key in ("seed", "steps", "seconds", "loss")} for run in longer
            ]
            found["loss_difference_at_equal_time"] = _interval(
                [ours["loss"] - other["loss"] for ours, other in zip(runs, longer, strict=True)]
            )
        return found

    def _stage(self, row: str) -> None:
        """Put a row on record as a stage, or take it from there unless it failed."""
        stage = f"{self.bench.id}.{row}"
        if self.session.ledger.is_measured(stage):
            self.rows += self.session.ledger[stage].benchmarks[0].rows
            return
        began = time.perf_counter()
        result = BenchmarkResult(stage, self.config.type)
        try:
            found = self.measure(row)
        except Exception as error:  # recorded in report.json and reported as exit status 1 by the worker
            logger.error(f"{stage}: {type(error).__name__}: {error}")
            result = dataclasses.replace(result, error=f"{type(error).__name__}: {error}")
        else:
            self.rows.append(found)
            low, high = found["loss_difference"]["low"], found["loss_difference"]["high"]
            logger.info(
                f"{stage}: held-out loss {found['val_loss']:.4f}, against AdamW {low:+.4f} to {high:+.4f}, lr "
                f"{found['lr']:g}"
            )
            result = dataclasses.replace(result, rows=(found,), metrics=self._metrics(found))
        seconds = time.perf_counter() - began
        phase = PhaseResult(stage, "optimizers", "none", 0, 0, seconds, "")
        self.session.ledger.put(
            StageRecord(phase, benchmarks=(dataclasses.replace(result, seconds=seconds),))
        )

    def _metrics(self, row: Row) -> tuple[Metric, ...]:
        n = self.config.seeds
        values = {
            "val_loss": (row["val_loss"], "nats/token"),
            "val_loss_deviation": (row["val_loss_deviation"], "nats/token"),
            "loss_difference": (row["loss_difference"]["mean"], "nats/token"),
            "lr": (row["lr"], "1"),
            "seconds": (row["seconds"], "s"),
        }
        if "loss_difference_at_equal_time" in row:
            values["time_difference"] = (row["loss_difference_at_equal_time"]["mean"], "nats/token")
        return tuple(
            Metric(f"optimizers.{self.role}.{field}@row={row['row']}", value, unit, n, None, self.bench.id)
            for field, (value, unit) in values.items()
        )

    def run(self) -> None:
        """Measure every row that is not on record yet, and write them to optimizers.json after each."""
        settings = self.config.model_dump(mode="json")
        for row in self.config.rows:
            self._stage(row)
            if not self.rows or self.rows[0]["row"] != "adamw":
                return
            write_json(self.session.run_dir / FILE, {"settings": settings, "rows": self.rows})


def _interval(differences: list[float]) -> dict[str, float]:
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
