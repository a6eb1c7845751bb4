"""The optimizer orchestrator on a byte model of the standard library: null test, spikes, false alarms. Writes JSON.

Usage on a CPU: python scripts/bench/run.py orchestrator [--seeds 50] [--clean 30] [--spikes 20]

- null: K candidates that are all the AdamW of the phase. `same` gives all the same batches, as is usual; `noisy`
  gives every candidate batches of its own, so that chance alone separates them.
- spikes: one damaged step in a run; the final held-out loss against the clean run of the same seed.
- false alarms: what the guard does in clean runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from record import Record, machine_facts

from caramba.config.model import ModelSpec
from caramba.config.train import PhaseConfig
from caramba.data import TokenDataset
from caramba.distill import LanguageModelObjective
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.data import train_loader
from caramba.train.module import CarambaModule
from caramba.train.orchestration.build import build_orchestration
from caramba.train.orchestration.trials import TrialData, Trials

SMOKE_OPTIONS = ("--seeds", "1", "--clean", "1", "--spikes", "1", "--steps", "40")
WIDTH, VOCAB, BLOCK, BATCH = 32, 256, 32, 8
KINDS = ("bad batch", "rate x 30", "corrupt moments")


def read_bytes(n: int) -> np.ndarray:
    """Return the first bytes of the standard library's modules, in the order of their names."""
    parts, total = [], 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        parts.append(file.read_bytes())
        total += len(parts[-1])
        if total >= n:
            break
    return np.frombuffer(b"".join(parts)[:n], dtype=np.uint8).astype(np.int64)


def model_spec() -> ModelSpec:
    norm = {"type": "RMSNormLayer", "d_model": WIDTH}
    block = [
        {
            "type": "ResidualTopology",
            "layers": [norm, {"type": "AttentionLayer", "d_model": WIDTH, "n_heads": 2}],
        },
        {"type": "ResidualTopology", "layers": [norm, {"type": "SwiGLULayer", "d_model": WIDTH, "d_ff": 64}]},
    ]
    return ModelSpec.model_validate(
        {
            "type": "TransformerModel",
            "embedder": {"type": "token", "vocab_size": VOCAB, "d_model": WIDTH},
            "topology": {"type": "StackedTopology", "layers": [*block, norm]},
        }
    )


class Damage(pl.Callback):
    """Damages one step: its batch, its rate or the moments before it."""

    def __init__(self, kind: str, step: int, seed: int) -> None:
        self.kind, self.step, self.seed = kind, step, seed

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.step:
            return
        draws = torch.Generator().manual_seed(self.seed)
        if self.kind == "bad batch":
            for tensor in batch:
                tensor.copy_(torch.randint(VOCAB, tensor.shape, generator=draws))
        elif self.kind == "corrupt moments":
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"].mul_(100.0)
                state["exp_avg_sq"].mul_(0.01)
        else:
            rate = module._learning_rate
            module._learning_rate = lambda step, steps: rate(step, steps) * (30 if step == self.step else 1)


def train(
    dataset: Any, phase: PhaseConfig, seed: int, callbacks: list[pl.Callback] | None = None
) -> dict[str, Any]:
    """Train once and return the held-out loss and the decisions."""
    objective = LanguageModelObjective(build_model(model_spec(), seed=seed))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = CarambaModule(objective, phase, NonFiniteWatch(phase, folder, "pretrain", lambda _: ()))
        data = SimpleNamespace(train=dataset, seed=seed, start=0)
        places: dict[str, Any] = {"per_step": BATCH, "share": (0, 1)}
        own: list[Any] = []
        if phase.orchestrator_enabled:
            device = torch.device("cpu")
            own.append(
                build_orchestration(
                    phase, "pretrain", data, objective, run_dir=folder, device=device, **places
                )
            )
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=phase.steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*(callbacks or []), *own],
        )
        began = time.perf_counter()
        trainer.fit(module, train_loader(dataset, phase, seed=seed, start=0, pin=False))
        seconds = time.perf_counter() - began
        file = folder / "decisions.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
    scored = phase if phase.orchestrator_enabled else phase_of(phase.steps)
    windows = TrialData(dataset, scored, seed=seed, start=0, **places).scoring(None)
    with torch.no_grad():
        losses = [float(objective.evaluate(batch)["loss"]) for batch in windows]
    return {
        "loss": statistics.fmean(losses),
        "seconds": seconds,
        "decisions": [json.loads(line) for line in lines],
        "trial_steps": own[0].orchestrator.trial_steps if own else 0,
    }


def phase_of(steps: int, **keys: Any) -> PhaseConfig:
    values: dict[str, Any] = {
        "phase": "pretrain",
        "steps": steps,
        "batch_size": BATCH,
        "block_size": BLOCK,
        "lr": 4e-3,
        "warmup_steps": max(1, steps // 20),
        "min_lr_ratio": 0.02,
        "weight_decay": 0.1,
        "orchestrator_enabled": True,
        "orchestrator_decision_interval": max(1, steps // 3 + 1),
        "orchestrator_eval_horizon": 4,
        "orchestrator_budget": 1.0,
        "orchestrator_min_steps_between_switches": 1,
    }
    return PhaseConfig(**{**values, **keys})


def measure_null(dataset: Any, seeds: int, steps: int) -> dict[str, Any]:
    """Train with four equal candidates, their trials on the same batches and on batches of their own."""
    adamw = {"optimizer": "adamw", "rate": 1.0}
    strategies = {"conservative_adamw": None, "b": adamw, "c": adamw, "d": adamw}
    plain = PhaseConfig.model_validate(
        {
            key: value
            for key, value in phase_of(steps).model_dump().items()
            if not key.startswith("orchestrator_")
        }
    )
    phase = phase_of(steps, orchestrator_strategies=strategies)
    found: dict[str, Any] = {}
    original = Trials._train

    def noisy(self: Trials, step: int, horizon: int, repeat: int) -> None:
        arm = list(strategies).index(self.portfolio.pending or self.portfolio.active)
        original(self, step, horizon, repeat + 3 * arm)

    for name in ("same", "noisy"):
        rows = []
        for seed in range(seeds):
            Trials._train = noisy if name == "noisy" else original  # type: ignore[method-assign]
            ours = train(dataset, phase, seed)
            Trials._train = original  # type: ignore[method-assign]
            bare = train(dataset, plain, seed)
            decided = [one for one in ours["decisions"] if one.get("interval")]
            rows.append(
                {
                    "seed": seed,
                    "decisions": len(decided),
                    "switches": sum(one["choice"] != one["strategy"] for one in decided),
                    "trial_steps": ours["trial_steps"],
                    "loss_minus_adamw": ours["loss"] - bare["loss"],
                }
            )
        decisions, switches = sum(row["decisions"] for row in rows), sum(row["switches"] for row in rows)
        found[name] = {
            "seeds": seeds,
            "decisions": decisions,
            "switches": switches,
            "share": switches / max(1, decisions),
            "largest_loss_difference": max(abs(row["loss_minus_adamw"]) for row in rows),
            "rows": rows,
        }
        print(f"null, {name}: {switches} switches in {decisions} decisions of {seeds} seeds", flush=True)
    return found


def measure_spikes(dataset: Any, n: int, clean: int, steps: int) -> dict[str, Any]:
    """Train clean runs, count what the guard did, and compare damaged runs with the clean one of their seed."""
    keys: dict[str, Any] = {
        "orchestrator_strategies": ["conservative_adamw", "spike_resistant"],
        "orchestrator_decision_interval": steps - 1,
        "orchestrator_mode": "active",
    }
    # Decisions would differ between a run and its clean twin: the last step alone has one.
    phase = phase_of(steps, **keys)
    clean_runs = []
    for seed in range(max(n, clean)):
        ours = train(dataset, phase, seed)
        kinds = [one["safety"] for one in ours["decisions"] if "safety" in one]
        clean_runs.append({"seed": seed, "loss": ours["loss"], "answers": kinds})
    alarms = sum(kind in ("undo", "rollback") for run in clean_runs[:clean] for kind in run["answers"])
    others = sum(kind in ("clip", "skip") for run in clean_runs[:clean] for kind in run["answers"])
    print(f"clean: {alarms} rollbacks, {others} clips and skips in {clean} runs", flush=True)
    rows = []
    for seed in range(n):
        kind, at = KINDS[seed % len(KINDS)], random.Random(seed).randrange(steps // 3, steps - steps // 5)
        ours = train(dataset, phase, seed, [Damage(kind, at, seed)])
        bare = train(
            dataset,
            phase_of(steps, **keys | {"orchestrator_mode": "monitor"}),
            seed,
            [Damage(kind, at, seed)],
        )
        base = clean_runs[seed]["loss"]
        rows.append(
            {
                "seed": seed,
                "kind": kind,
                "step": at,
                "clean_loss": base,
                "loss": ours["loss"],
                "loss_without_guard": bare["loss"],
                "within_1_percent": ours["loss"] <= 1.01 * base,
                "without_guard_within_1_percent": bare["loss"] <= 1.01 * base,
                "answers": [one["safety"] for one in ours["decisions"] if "safety" in one],
            }
        )
        print(
            f"{kind:16s} step {at}: {ours['loss']:.4f} clean {base:.4f} bare {bare['loss']:.4f}", flush=True
        )
    good = sum(row["within_1_percent"] for row in rows)
    bare_good = sum(row["without_guard_within_1_percent"] for row in rows)
    print(f"spikes: {good} of {n} within 1%, {bare_good} without the guard", flush=True)
    return {
        "clean_runs": clean,
        "false_rollbacks": alarms,
        "clips_and_skips": others,
        "spikes": n,
        "within_1_percent": good,
        "without_guard_within_1_percent": bare_good,
        "rows": rows,
        "clean": clean_runs,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=50, help="seeds of the null test")
    parser.add_argument("--clean", type=int, default=30, help="clean runs")
    parser.add_argument("--spikes", type=int, default=20, help="damaged runs")
    parser.add_argument("--steps", type=int, default=150, help="steps of a run")


def run(options: argparse.Namespace, record: Record) -> int | None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    dataset = TokenDataset(read_bytes(600_000), BLOCK)
    null = measure_null(dataset, options.seeds, min(options.steps, 100))
    spikes = measure_spikes(dataset, options.spikes, options.clean, options.steps)
    record.write_data(
        {
            **record.head(machine_facts(torch.device("cpu"))),
            "steps": options.steps,
            "null": null,
            "spikes": spikes,
        }
    )
    return None
