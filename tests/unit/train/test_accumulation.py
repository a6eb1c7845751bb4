"""A step of several micro-batches is the step of one large batch, whatever share of each is padding."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from caramba.config.train import PhaseConfig
from caramba.data.dataset import DocumentDataset, PackedDataset
from caramba.distill import Batch, LanguageModelObjective
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.data import mean_targets, targets_per_window, train_loader
from caramba.train.module import CarambaModule
from tests.unit.model.model_specs import NORM, VOCAB, spec

STEPS, BLOCK, SEED = 3, 8, 4
LENGTHS = np.array([6, 7, 9, 4, 7, 16] * 8)  # which leave room in windows that nothing fits
STARTS = np.cumsum(LENGTHS) - LENGTHS
TOKENS = np.random.default_rng(0).integers(VOCAB, size=int(LENGTHS.sum()))


class StepLosses(pl.Callback):
    """The loss of every step, as a run records it."""

    def __init__(self) -> None:
        self.found: list[float] = []
        self.running = 0.0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: CarambaModule, outputs: dict, batch: Batch, batch_idx: int
    ) -> None:
        if pl_module.micro_steps == 0:
            self.found.append(float(outputs["loss"]))


def train(
    windows: PackedDataset | DocumentDataset, batch_size: int, times: int, folder: Path
) -> tuple[StepLosses, list[torch.Tensor]]:
    phase = PhaseConfig(
        phase="pretrain",
        steps=STEPS,
        batch_size=batch_size,
        gradient_accumulation_steps=times,
        block_size=BLOCK,
        optimizer="sgd",
        lr=0.5,
        max_grad_norm=None,
    )
    targets = targets_per_window(windows)
    module = CarambaModule(
        LanguageModelObjective(build_model(spec(NORM), seed=0)),
        phase,
        NonFiniteWatch(phase, folder, "pretrain", lambda _: ()),
        targets_of=mean_targets(targets, seed=SEED, start=2, samples=batch_size * times, batches=times),
    )
    losses = StepLosses()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[losses],
    )
    trainer.fit(module, train_loader(windows, phase, seed=SEED, start=2, pin=False))
    losses.running = module.running_loss()
    return losses, [value.detach() for value in module.model.parameters()]


@pytest.mark.parametrize(
    "windows", [PackedDataset(TOKENS, STARTS, BLOCK, pad_id=0), DocumentDataset(TOKENS, STARTS, BLOCK)]
)
def test_micro_batches_weigh_as_their_targets_do(windows: PackedDataset | DocumentDataset, tmp_path: Path) -> None:
    losses, weights = train(windows, 6, 1, tmp_path)
    assert losses.running == pytest.approx(sum(losses.found) / STEPS, rel=1e-6)
    for times in (2, 6):
        others, theirs = train(windows, 6 // times, times, tmp_path)
        assert others.found == pytest.approx(losses.found, rel=1e-5), "of the step, not of its last micro-batch"
        assert others.running == pytest.approx(losses.running, rel=1e-5), "of steps, not of micro-batches"
        for ours, other in zip(weights, theirs, strict=True):
            torch.testing.assert_close(other, ours, rtol=1e-4, atol=1e-6)


def test_the_first_loss_is_the_mean_over_all_targets_of_the_step(tmp_path: Path) -> None:
    windows = PackedDataset(TOKENS, STARTS, BLOCK, pad_id=0)
    phase = PhaseConfig(phase="pretrain", steps=1, batch_size=6, block_size=BLOCK)
    batch = next(iter(train_loader(windows, phase, seed=SEED, start=2, pin=False)))
    assert len(set((batch[1] != -100).sum(1).tolist())) > 1, "windows of other padding"
    whole = LanguageModelObjective(build_model(spec(NORM), seed=0)).losses(batch).loss
    losses, _ = train(windows, 1, 6, tmp_path)
    assert losses.found[0] == pytest.approx(float(whole.detach()), rel=1e-5)


def test_equal_windows_and_single_batches_need_no_weights() -> None:
    even, uneven = np.full(10, 8), np.arange(10)
    assert mean_targets(even, seed=0, start=0, samples=4, batches=2) is None
    assert mean_targets(uneven, seed=0, start=0, samples=4, batches=1) is None
    of = mean_targets(uneven, seed=0, start=0, samples=10, batches=5)
    assert of is not None
    assert [of(step) for step in (0, 1, 0)] == [9.0, 9.0, 9.0], "45 targets of each epoch in 5 micro-batches"
    empty = mean_targets(np.array([0, 0, 8]), seed=0, start=0, samples=1, batches=2)
    assert empty is not None
    assert min(empty(step) for step in range(3)) == 0.5, "a step without a target divides by no 0"


def test_a_collated_batch_counts_what_its_windows_say() -> None:
    windows = PackedDataset(TOKENS, STARTS, BLOCK, pad_id=0)
    y = default_collate([windows[index] for index in range(len(windows))])[1]
    assert (y != -100).sum(1).tolist() == targets_per_window(windows).tolist()
