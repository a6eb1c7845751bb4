"""A phase that saves an average of its weights validates that average, and trains on as if it had not."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.module import CarambaModule
from tests.unit.model.model_specs import NORM, VOCAB, spec

STEPS = 6


class Recorded(CarambaModule):
    """Keeps the held-out losses, in place of loggers."""

    found: list[float]

    def record(self, values: dict[str, float]) -> None:
        self.found.append(values["val_loss"])


def windows(seed: int) -> TensorDataset:
    tokens = torch.randint(VOCAB, (STEPS, 9), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


def train(folder: Path, *, every: int) -> tuple[Recorded, list[Tensor]]:
    phase = PhaseConfig(
        phase="pretrain",
        steps=STEPS,
        lr=0.05,
        block_size=8,
        batch_size=1,
        ema_decay=0.9,
        scheduler="constant",
    )
    watch = NonFiniteWatch(phase, folder, "pretrain", lambda _: ())
    module = Recorded(LanguageModelObjective(build_model(spec(NORM), seed=0)), phase, watch)
    module.found = []
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=every or None,
        limit_val_batches=1.0 if every else 0,
    )
    trainer.fit(module, DataLoader(windows(0)), DataLoader(windows(1), batch_size=STEPS))
    return module, [value.detach().clone() for value in module.model.parameters()]


def test_the_average_is_validated_and_the_weights_are_trained(tmp_path: Path) -> None:
    module, weights = train(tmp_path, every=2)
    _, alone = train(tmp_path, every=0)
    assert all(torch.equal(ours, other) for ours, other in zip(weights, alone, strict=True))
    batch = [torch.stack(part) for part in zip(*windows(1), strict=True)]
    of_weights = float(module.objective.evaluate(tuple(batch))["loss"])
    assert module.average is not None
    module.average.copy_to_weights()
    of_average = float(module.objective.evaluate(tuple(batch))["loss"])
    assert abs(of_average - of_weights) > 1e-3
    assert len(module.found) == 3
    assert module.found[-1] == pytest.approx(of_average, rel=1e-6)
