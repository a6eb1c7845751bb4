"""The optimizer orchestrator: null test, spikes and false alarms of a byte model on a CPU; its cost. Writes JSON.

Usage on a CPU: python scripts/bench/run.py orchestrator [--seeds 50] [--clean 30] [--spikes 20]
Usage on a GPU: python scripts/bench/run.py orchestrator --parts cost --out docs/benchmarks/orchestrator_cost.json

- null: K candidates that are all the AdamW of the phase. `same` gives all the same batches, as is usual; `noisy`
  gives every candidate batches of its own, so that chance alone separates them.
- spikes: one damaged step in a run; the final held-out loss against the clean run of the same seed.
- false alarms: what the guard does in clean runs.
- cost: seconds of a step in monitor mode, and in active mode without trials, over a plain step of a model of 20M
  weights. The three take turns; each is timed over `--timed` steps, which hold a decision and the guard's snapshots.
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
from record import Record, shown
from registry import check_names

from caramba.config.model import ModelSpec
from caramba.config.train import PhaseConfig
from caramba.data import TokenDataset
from caramba.distill import LanguageModelObjective
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.data import train_loader
from caramba.train.module import CarambaModule
from caramba.train.orchestration.build import build_orchestration
from caramba.train.orchestration.policies import compute_interval
from caramba.train.orchestration.trials import TrialData, Trials

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


def model_spec(width: int = WIDTH, d_ff: int = 64, heads: int = 2, blocks: int = 1, vocab: int = VOCAB) -> ModelSpec:
    norm = {"type": "RMSNormLayer", "d_model": width}
    attention = {"type": "AttentionLayer", "d_model": width, "n_heads": heads}
    mlp = {"type": "SwiGLULayer", "d_model": width, "d_ff": d_ff}
    block = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, mlp)]
    embedder = {"type": "token", "vocab_size": vocab, "d_model": width}
    topology = {"type": "StackedTopology", "layers": [*block * blocks, norm]}
    return ModelSpec.model_validate({"type": "TransformerModel", "embedder": embedder, "topology": topology})


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
    dataset: Any,
    phase: PhaseConfig,
    seed: int,
    *callbacks: pl.Callback,
    spec: ModelSpec | None = None,
    device: torch.device | None = None,
    precision: Any = "32-true",
    scores: bool = True,
) -> dict[str, Any]:
    """Train once and return the held-out loss, unless not `scores`, and the decisions."""
    device = device or torch.device("cpu")
    objective = LanguageModelObjective(build_model(spec or model_spec(), seed=seed).to(device))
    data = SimpleNamespace(train=dataset, seed=seed, start=0)
    places: dict[str, Any] = {"per_step": phase.batch_size, "share": (0, 1)}
    own: list[Any] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        module = CarambaModule(objective, phase, NonFiniteWatch(phase, folder, "pretrain", lambda _: ()))
        if phase.orchestrator_enabled:
            where = {"run_dir": folder, "device": device, **places}
            own.append(build_orchestration(phase, "pretrain", data, objective, **where))
        names = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        quiet: dict[str, Any] = dict.fromkeys(names, False)
        keys = {"accelerator": device.type, "devices": 1, "precision": precision, "max_steps": phase.steps}
        trainer = pl.Trainer(**keys, callbacks=[*callbacks, *own], **quiet)
        pin = device.type == "cuda"
        trainer.fit(module, train_loader(dataset, phase, seed=seed, start=0, pin=pin))
        file = folder / "decisions.jsonl"
        lines = file.read_text().splitlines() if file.is_file() else []
    scored = phase if phase.orchestrator_enabled else phase_of(phase.steps)
    losses = []
    if scores:
        windows = TrialData(dataset, scored, seed=seed, start=0, **places).scoring(None)
        with torch.no_grad():
            losses = [float(objective.evaluate(batch)["loss"]) for batch in windows]
    decisions = [json.loads(line) for line in lines]
    return {
        "loss": statistics.fmean(losses) if losses else None,
        "decisions": decisions,
        "answers": [one["safety"] for one in decisions if "safety" in one],
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
    keys = phase_of(steps).model_dump()
    plain = PhaseConfig(**{key: keys[key] for key in keys if not key.startswith("orchestrator_")})
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
            switches = sum(one["choice"] != one["strategy"] for one in decided)
            row = {"seed": seed, "decisions": len(decided), "switches": switches}
            lost = {"loss_minus_adamw": ours["loss"] - bare["loss"]}
            rows.append(row | {"trial_steps": ours["trial_steps"]} | lost)
        decisions, switches = sum(row["decisions"] for row in rows), sum(row["switches"] for row in rows)
        found[name] = {
            "seeds": seeds,
            "decisions": decisions,
            "switches": switches,
            "share": switches / max(1, decisions),
            "largest_loss_difference": max(abs(row["loss_minus_adamw"]) for row in rows),
            "rows": rows,
        }
        print(f"null, {name}: {shown(found[name])}", flush=True)
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
    runs = [train(dataset, phase, seed) for seed in range(max(n, clean))]
    clean_runs = [{"seed": seed, "loss": run["loss"], "answers": run["answers"]} for seed, run in enumerate(runs)]
    answers = [kind for run in clean_runs[:clean] for kind in run["answers"]]
    monitored = phase_of(steps, **keys | {"orchestrator_mode": "monitor"})
    rows = []
    for seed in range(n):
        kind, at = KINDS[seed % len(KINDS)], random.Random(seed).randrange(steps // 3, steps - steps // 5)
        ours = train(dataset, phase, seed, Damage(kind, at, seed))
        bare = train(dataset, monitored, seed, Damage(kind, at, seed))
        base = clean_runs[seed]["loss"]
        row = {"seed": seed, "kind": kind, "step": at, "clean_loss": base, "loss": ours["loss"]}
        row |= {"loss_without_guard": bare["loss"], "within_1_percent": ours["loss"] <= 1.01 * base}
        row |= {"without_guard_within_1_percent": bare["loss"] <= 1.01 * base, "answers": ours["answers"]}
        rows.append(row)
        print(shown(row), flush=True)
    within = ("within_1_percent", "without_guard_within_1_percent")
    found = {
        "clean_runs": clean,
        "false_rollbacks": sum(kind in ("undo", "rollback") for kind in answers),
        "clips_and_skips": sum(kind in ("clip", "skip") for kind in answers),
        "spikes": n,
        **{key: sum(row[key] for row in rows) for key in within},
    }
    print(shown(found), flush=True)
    return found | {"rows": rows, "clean": clean_runs}


SIZES = {"20m": (384, 1024, 6, 8, 16384), "tiny": (WIDTH, 64, 2, 1, VOCAB)}
WARM = 30


class Clock(pl.Callback):
    """Seconds of a step after the first WARM; the device is waited for at both ends alone."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, 0.0

    def _now(self) -> float:
        if self.device.type == "cpu":
            return time.process_time()  # other work does not lengthen it
        torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == WARM:
            self.began = self._now()

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.seconds = (self._now() - self.began) / (trainer.global_step - WARM)


def measure_cost(size: str, batch: int, block: int, timed: int, repeats: int, device: torch.device) -> dict[str, Any]:
    """Time steps of AdamW, of monitor mode, and of active mode with AdamW alone, in turns."""
    steps = WARM + timed
    tokens = np.random.default_rng(0).integers(SIZES[size][-1], size=(steps + 1) * batch * block)
    spec = model_spec(*SIZES[size])
    keys: dict[str, Any] = {"batch_size": batch, "block_size": block, "lr": 1e-4}
    keys |= {"orchestrator_decision_interval": timed}
    plain = phase_of(steps, **keys).model_dump()
    alone = {"orchestrator_strategies": ["conservative_adamw"]}
    phases = {
        "plain": PhaseConfig(**{key: plain[key] for key in plain if not key.startswith("orchestrator_")}),
        "monitor": phase_of(steps, **keys, orchestrator_mode="monitor"),
        "active": phase_of(steps, **keys, **alone),
    }
    precision = "bf16-mixed" if device.type == "cuda" else "32-true"
    seconds: dict[str, list[float]] = {name: [] for name in phases}
    for _ in range(repeats):
        for name, phase in phases.items():
            clock = Clock(device)
            dataset = TokenDataset(tokens, block)
            train(dataset, phase, 0, clock, spec=spec, device=device, precision=precision, scores=False)
            seconds[name].append(clock.seconds)
    found: dict[str, Any] = {"size": size, "batch": batch, "block": block, "seconds": seconds}
    found["weights"] = sum(p.numel() for p in build_model(spec, seed=0).parameters())
    for name in ("monitor", "active"):
        pairs = zip(seconds[name], seconds["plain"], strict=True)
        interval = compute_interval([ours / bare - 1.0 for ours, bare in pairs])
        found[name] = {"cost": interval.mean, "low": interval.low, "high": interval.high}
        print(f"{name}: {found[name]['cost']:+.2%} ({interval.low:+.2%} to {interval.high:+.2%})", flush=True)
    return found


PARTS = ("null", "spikes", "cost")
OPTIONS = (
    "--parts=null,spikes --seeds=50 --clean=30 --spikes=20 --steps=150 --size=20m|tiny --batch=64 --block=512 "
    "--timed=100 --repeats=6"
)
SMOKE_OPTIONS = (
    "--parts null,spikes,cost --seeds 1 --clean 1 --spikes 1 --steps 40 "
    "--size tiny --batch 1 --block 8 --timed 4 --repeats 2"
)


def run(options: argparse.Namespace, record: Record) -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    check_names("--parts", options.parts, PARTS)
    if "cost" not in options.parts:
        record.device = torch.device("cpu")
    record.start(steps=options.steps)
    dataset = TokenDataset(read_bytes(600_000), BLOCK)
    if "null" in options.parts:
        record.save(null=measure_null(dataset, options.seeds, min(options.steps, 100)))
    if "spikes" in options.parts:
        record.save(spikes=measure_spikes(dataset, options.spikes, options.clean, options.steps))
    if "cost" in options.parts:
        sizes = (options.size, options.batch, options.block, options.timed, options.repeats)
        record.save(cost=measure_cost(*sizes, record.device))
