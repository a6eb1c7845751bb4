"""A tiny phase that an orchestrator trains, in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.data.dataset import PackedDataset
from caramba.distill import LanguageModelObjective
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.callbacks import Checkpointing, GradientAveraging
from caramba.train.data import train_loader
from caramba.train.module import CarambaModule
from caramba.train.orchestration.build import Orchestration, build_orchestration
from caramba.train.strategies import AVERAGED, SINGLE, strategy_arguments
from caramba.train.trainer import WholeCheckpointIO, read_saved_step
from tests.unit.model.model_specs import NORM, VOCAB, spec

BLOCK, BATCH, SEED = 8, 4, 3


def windows(n: int = 1200) -> PackedDataset:
    """Tokens that follow one another by a rule, mostly, so that there is something to learn."""
    random = np.random.default_rng(0)
    tokens = np.zeros(n * (BLOCK + 1), dtype=np.int64)
    noise = random.random(len(tokens)) < 0.3
    drawn = random.integers(VOCAB, size=len(tokens))
    for at in range(1, len(tokens)):
        tokens[at] = drawn[at] if noise[at] else (3 * tokens[at - 1] + 1) % VOCAB
    starts = np.arange(0, len(tokens), BLOCK + 1)
    return PackedDataset(tokens, starts, BLOCK, pad_id=0)


def phase_of(**keys: Any) -> PhaseConfig:
    values: dict[str, Any] = {
        "phase": "pretrain",
        "steps": 40,
        "batch_size": BATCH,
        "block_size": BLOCK,
        "lr": 1e-2,
        "warmup_steps": 4,
        "weight_decay": 0.1,
        "seed": SEED,
        "save_every": 1,
    }
    return PhaseConfig(**{**values, **keys})


def orchestrated(**keys: Any) -> PhaseConfig:
    values: dict[str, Any] = {
        "orchestrator_enabled": True,
        "orchestrator_strategies": ["conservative_adamw", "muon", "lion"],
        "orchestrator_decision_interval": 10,
        "orchestrator_eval_horizon": 4,
        "orchestrator_repeats": 2,
        "orchestrator_budget": 1.0,
        "orchestrator_min_steps_between_switches": 10,
        "orchestrator_ramp_steps": 5,
    }
    return phase_of(**{**values, **keys})


class KilledError(Exception):
    """In place of a kill: nothing is saved after it."""


class KillAt(pl.Callback):
    """Raises before a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise KilledError


@dataclass
class Trained:
    """What a phase ended with."""

    weights: list[list[float]]
    module: CarambaModule
    callback: Orchestration | None
    decisions: list[dict[str, Any]]


def train(
    phase: PhaseConfig,
    folder: Path,
    callbacks: list[pl.Callback] | None = None,
    share: tuple[int, int] = (0, 1),
) -> Trained:
    """Train from the state in a folder, or from the beginning; `share` is (rank, ranks) of parallel=ddp."""
    dataset, state = windows(), folder / "state.pt"
    position = read_saved_step(state)
    per_step = BATCH * phase.gradient_accumulation_steps * share[1]
    parallel = ParallelConfig(strategy="ddp", dp=share[1]) if share[1] > 1 else ParallelConfig()
    way = AVERAGED if share[1] > 1 else SINGLE
    places, who = strategy_arguments(parallel, way, torch.device("cpu"))
    objective = LanguageModelObjective(build_model(spec(NORM), seed=0))
    watch = NonFiniteWatch(phase, folder, "pretrain", lambda _: ())
    module = CarambaModule(objective, phase, watch, way=way)
    own = None
    if phase.orchestrator_enabled:
        own = build_orchestration(
            phase,
            "pretrain",
            SimpleNamespace(train=dataset, seed=SEED, start=0),
            objective,
            run_dir=folder,
            per_step=per_step,
            share=share,
            device=torch.device("cpu"),
        )
    trainer = pl.Trainer(
        accelerator="cpu",
        **places,
        use_distributed_sampler=False,
        max_steps=phase.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[WholeCheckpointIO(), *who],
        callbacks=[
            *(callbacks or []),
            *([GradientAveraging(parallel, phase)] if way == AVERAGED else []),
            *([] if own is None else [own]),
            Checkpointing(state, phase.save_every, lambda: None),
        ],
    )
    loader = train_loader(dataset, phase, seed=SEED, start=position * per_step, pin=False, share=share)
    trainer.fit(module, loader, ckpt_path=str(state) if position else None, weights_only=True)
    path = folder / "decisions.jsonl"
    decisions = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    values = [value.detach().flatten().tolist() for value in module.model.parameters()]
    return Trained(values, module, own, decisions)
