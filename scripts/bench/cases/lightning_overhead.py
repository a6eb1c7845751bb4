"""What Lightning and caramba's callbacks add to a training step, against a bare loop over the same model and batches.

Both sides train the `tiny` model on the same windows from the same weights; they take turns, so drift of the
machine hits both. The loss of the last step must agree, or the two do not do the same work. The median step is one
without a row of metrics; the mean step and the monitors' own share of the time hold those rows too. Writes JSON.

Usage: python scripts/bench/run.py lightning_overhead [--steps 120] [--repeats 5] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Record, shown

from caramba.config.manifest import Manifest
from caramba.config.train import PhaseConfig
from caramba.data import TokenDataset, open_corpus
from caramba.distill import LanguageModelObjective
from caramba.launch.freeze import freeze
from caramba.model import build_model
from caramba.optim import build_optimizer, clip_gradients, learning_rate
from caramba.runtime import plan
from caramba.train import PhaseData, fit
from caramba.train.data import train_loader

# Share of a repeat's wall time spent in the monitors: rows written, norms, memory and the clock.
MONITORS: list[float] = []


def bare_loop(manifest: Manifest, phase: PhaseConfig, data: PhaseData) -> tuple[list[float], float]:
    """Train without Lightning. Returns the seconds of each step and the last loss."""
    model = build_model(manifest.model, seed=manifest.seed)
    optimizer = build_optimizer(model.named_parameters(), phase)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    objective = LanguageModelObjective(model)
    batches = iter(train_loader(data.train, phase, seed=data.seed, start=data.start, pin=False))
    seconds, loss = [], torch.zeros(())
    for step in range(phase.steps):
        began = time.perf_counter()
        x, y = next(batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(phase, step)
        loss = objective.losses((x, y)).loss
        loss.backward()
        clip_gradients([parameters], phase.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    return seconds, float(loss.detach())


def through_lightning(manifest: Manifest, phase: PhaseConfig, data: PhaseData) -> tuple[list[float], float]:
    """Train through `fit` with every callback that a run has. Returns the seconds between steps and the last loss."""
    import lightning.pytorch as pl

    class Clock(pl.Callback):
        def __init__(self) -> None:
            self.marks: list[float] = []
            self.loss = float("nan")

        def on_train_start(self, *_: object) -> None:
            self.marks.append(time.perf_counter())

        def on_train_batch_end(
            self, trainer: object, module: object, outputs: dict[str, torch.Tensor], *_: object
        ) -> None:
            self.marks.append(time.perf_counter())
            self.loss = float(outputs["loss"])

    spent = time_monitors()
    clock = Clock()
    objective = LanguageModelObjective(build_model(manifest.model, seed=manifest.seed))
    with tempfile.TemporaryDirectory() as folder:
        decided = plan(phase, device="cpu", kernels="auto", ops={}, name="overhead")
        fit(
            objective,
            phase,
            data,
            decided,
            manifest=manifest,
            run_dir=Path(folder),
            save_final=lambda: None,
            callbacks=[clock],
        )
    MONITORS.append(spent() / (clock.marks[-1] - clock.marks[0]))
    return [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)], clock.loss


def time_monitors() -> Callable[[], float]:
    """Time every call into the monitors from now on; returns what gives the seconds so far."""
    from caramba.train.callbacks import Monitoring
    from caramba.train.throughput import StepNorms

    total = [0.0]

    def time_method(owner: type, name: str) -> None:
        original = getattr(owner, name)
        original = getattr(original, "untimed", original)

        @functools.wraps(original)
        def call(*arguments: object, **options: object) -> object:
            began = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                total[0] += time.perf_counter() - began

        call.untimed = original  # type: ignore[attr-defined]
        setattr(owner, name, call)

    time_method(Monitoring, "on_train_batch_end")
    time_method(StepNorms, "_begin")
    time_method(StepNorms, "_end")
    return lambda: total[0]


OPTIONS = "--steps=120 --repeats=5 --warmup=20"  # the first steps of a repeat are left out


def run(options: argparse.Namespace, record: Record) -> None:
    words = ["model=tiny", "train=pretrain", f"train.steps={options.steps}", "settings.instrument=none"]
    manifest = freeze(words).manifest
    phase = manifest.groups[0].runs[0].train
    assert phase is not None
    corpus = open_corpus(manifest.groups[0].data)
    windows = (TokenDataset(split, phase.block_size) for split in (corpus.train, corpus.val))
    data = PhaseData(*windows, manifest.seed, 0)
    sides = {"bare": bare_loop, "lightning": through_lightning}
    medians: dict[str, list[float]] = {name: [] for name in sides}
    averages: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, float] = {}
    for _ in range(options.repeats):
        for name, side in sides.items():
            seconds, losses[name] = side(manifest, phase, data)
            medians[name].append(1000 * statistics.median(seconds[options.warmup :]))
            averages[name].append(1000 * statistics.fmean(seconds[options.warmup :]))
    if losses["bare"] != losses["lightning"]:
        raise SystemExit(f"the two sides do different work: last losses {losses}")

    def overhead(times: dict[str, list[float]]) -> list[float]:
        return [b / a - 1 for a, b in zip(times["bare"], times["lightning"], strict=True)]

    def both(values: list[float]) -> dict[str, Any]:
        return {"median": statistics.median(values), "all": values}

    threads = torch.get_num_threads()
    record.start({"platform": platform.platform(), "torch": torch.__version__, "threads": threads})
    record.save(
        model="tiny",
        tokens_per_step=phase.tokens // phase.steps,
        step_ms={name: both(values) for name, values in medians.items()},
        overhead=both(overhead(medians)),
        mean_overhead=both(overhead(averages)),
        monitors_share=both(MONITORS),
        last_loss=losses,
    )
    print(shown(record.data))
