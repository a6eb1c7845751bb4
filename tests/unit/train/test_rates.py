"""Multiples of the learning rate by pattern of names, in the step that a phase takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.module import CarambaModule
from tests.unit.model.model_specs import VOCAB, transformer


def change_of_one_step(folder: Path, **lr_mult: float) -> dict[str, Tensor]:
    model = build_model(transformer("standard"), seed=0)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    phase = PhaseConfig.model_validate(
        {"phase": "pretrain", "steps": 1, "block_size": 8, "optimizer": "sgd", "lr": 0.5, "max_grad_norm": None}
        | {"lr_mult": lr_mult}
    )
    watch = NonFiniteWatch(phase, folder, "pretrain", lambda _: ())
    module = CarambaModule(LanguageModelObjective(model), phase, watch)
    rows = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, enable_model_summary=False, **options)
    trainer.fit(module, DataLoader(TensorDataset(rows[:, :-1], rows[:, 1:]), batch_size=2))
    assert module.rate == 0.5
    return {name: value.detach() - before[name] for name, value in model.named_parameters()}


def test_steps_are_as_many_times_as_long_and_zero_leaves_weights_as_they_are(tmp_path: Path) -> None:
    plain = change_of_one_step(tmp_path)
    ours = change_of_one_step(tmp_path, **{"topology.*": 3.0, "*.q.weight": 0.0})
    changed = [name for name in plain if name.startswith("topology.") and not name.endswith(".q.weight")]
    assert any(plain[name].abs().max() > 1e-4 for name in changed)
    for name, moved in plain.items():
        factor = 0.0 if name.endswith(".q.weight") else 3.0 if name in changed else 1.0
        torch.testing.assert_close(ours[name], factor * moved, atol=1e-6, rtol=1e-4)
    assert not any(moved.any() for name, moved in ours.items() if name.endswith(".q.weight"))
