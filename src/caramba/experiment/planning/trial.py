"""One trial: a few steps of a phase through the same fit() that trains it, on random tokens."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from caramba.config.manifest import DebugConfig, LoggerConfig, Manifest
from caramba.config.train import PhaseConfig
from caramba.config.trainer import TrainerConfig
from caramba.data import TokenDataset
from caramba.distill import Objective
from caramba.errors import OutOfMemory
from caramba.experiment.planning.candidate import StepCandidate, Trial
from caramba.runtime import MemoryMeter, RuntimePlan, synchronize
from caramba.train import PhaseData, fit

DOCUMENTS = 4  # per row, if attention is masked per document
SEED = 1337


class RandomWindows(TokenDataset):
    """Windows of uniformly random tokens, of one or of several documents each.

    Shape: item: x, y and, with documents, their ids, each int64 [T].
    """

    def __init__(self, n_windows: int, block_size: int, vocab_size: int, has_documents: bool) -> None:
        draw = np.random.default_rng(SEED)
        super().__init__(draw.integers(0, vocab_size, n_windows * block_size + 1), block_size)
        self.has_documents = has_documents

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        pair = super().__getitem__(index)
        if not self.has_documents:
            return pair
        return *pair, torch.arange(self.block_size) * DOCUMENTS // self.block_size


class Stopwatch(pl.Callback):
    """Times every optimiser step, its data included, and ends training after `steps` of them."""

    def __init__(self, device: torch.device, steps: int, accumulation: int) -> None:
        self.device, self.steps, self.accumulation = device, steps, accumulation
        self.seconds: list[float] = []
        self.loss = 0.0
        self._clock = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        synchronize(self.device)
        self._clock = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.micro_steps:
            return
        synchronize(self.device)
        now = time.perf_counter()
        self.seconds.append((now - self._clock) / self.accumulation)
        self._clock = now
        self.loss = float(outputs["loss"])
        trainer.should_stop = len(self.seconds) >= self.steps


def disable_logging(manifest: Manifest) -> Manifest:
    """Return a manifest whose phases show, log, stop and call back nothing: for steps that are only measured."""
    return manifest.model_copy(
        update={
            "logger": LoggerConfig(tensorboard=False),
            "debug": DebugConfig(),
            "trainer": TrainerConfig(),
            "callbacks": (),
            "settings": manifest.settings.model_copy(update={"instrument": "none"}),
        }
    )


def run_trial(
    candidate: StepCandidate,
    phase: PhaseConfig,
    plan_of: Callable[[PhaseConfig], RuntimePlan],
    objective_of: Callable[[PhaseConfig, RuntimePlan], Objective],
    *,
    manifest: Manifest,
    meter: MemoryMeter,
    vocab_size: int,
    has_documents: bool,
) -> Trial:
    """Train for the steps of a candidate and say what they took.

    Two micro-batches stand for any number of accumulated ones: gradients exist while the second runs.

    Args:
        meter: the same for every trial of a process.
        objective_of: builds a new model and objective of the phase.
    """
    accumulation = min(phase.gradient_accumulation_steps, 2)
    steps = candidate.warm_up + candidate.timed
    settled = phase.model_copy(
        update={
            "batch_size": candidate.batch_size,
            "compile_model": candidate.compile_model,
            "activation_checkpointing": candidate.activation_checkpointing,
            "activation_checkpoint_threshold": None,
            "dtype": candidate.dtype,
            "use_amp": False if phase.has_16_bit_weights else "auto",
            "num_workers": 0,
            "gradient_accumulation_steps": accumulation,
            # At least one that is never run, as the end of a phase saves and gathers; blocks in turn need them all.
            "steps": max(steps + 1, phase.steps),
            "convergence": None,
            "warmup_steps": 0,
            "save_every": None,
            "eval_every": None,
            "cache_teacher_outputs": False,
            "teacher_logits": None,
        }
    )
    plan = plan_of(settled)
    settled = settled.model_copy(update={"lr": plan.value("lr")})
    device = torch.device(plan.value("device"))
    torch.compiler.reset()
    torch.manual_seed(SEED)
    objective = objective_of(settled, plan)
    watch = Stopwatch(device, steps, accumulation)
    windows = RandomWindows(candidate.batch_size * accumulation * 2, phase.block_size, vocab_size, has_documents)
    meter.start()
    with tempfile.TemporaryDirectory() as folder:
        try:
            fit(
                objective,
                settled,
                PhaseData(windows, windows, seed=SEED, start=0),
                plan,
                manifest=disable_logging(manifest),
                run_dir=Path(folder),
                save_final=lambda: None,
                callbacks=[watch],
            )
        except OutOfMemory:
            return Trial(candidate, refusal="out of memory", is_out_of_memory=True)
    return Trial(candidate, tuple(watch.seconds), meter.peak_bytes(), watch.loss)
