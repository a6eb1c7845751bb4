"""A compiled block whose gradients are lost ends the phase; one that begins with zeros does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.errors import CarambaError
from caramba.model import Model, build_model
from caramba.model.topology import compilable_regions
from caramba.optim import NonFiniteWatch
from caramba.train.callbacks import CompiledGradients
from caramba.train.module import CarambaModule
from tests.unit.model.model_specs import VOCAB, block, spec


class Lost(torch.autograd.Function):
    """What torch 2.11 made of an exchange between ranks: right numbers, and a gradient of zeros."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return torch.zeros_like(grads[0])


def train(model: Model, folder: Path, steps: int = 4) -> CompiledGradients:
    tokens = torch.randint(VOCAB, (steps, 9), generator=torch.Generator().manual_seed(0))
    windows = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    phase = PhaseConfig(phase="pretrain", steps=steps, lr=1e-2, block_size=8, batch_size=1)
    objective, check = LanguageModelObjective(model), CompiledGradients(compilable_regions(model.topology))
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[check],
    )
    watch = NonFiniteWatch(phase, folder, "pretrain", lambda _: ())
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(windows, batch_size=1)
    trainer.fit(CarambaModule(objective, phase, watch), loader)
    return check


def test_a_block_without_gradients_is_refused_by_its_weights(tmp_path: Path) -> None:
    model = build_model(spec(block("standard")), seed=0)
    region: Any = compilable_regions(model.topology)[1]
    inner = region.layers[-1]
    forward = inner.forward
    inner.forward = lambda *values: Lost.apply(forward(*values))
    own = {id(value) for value in region.parameters()}
    names = [name for name, value in model.named_parameters() if id(value) in own]
    with pytest.raises(
        CarambaError,
        match=rf"pretrain: compiled blocks are not trained: the gradients of {len(names)} weights .* {names[0]}",
    ):
        train(model, tmp_path)


def test_blocks_behind_a_head_of_zeros_are_trained(tmp_path: Path) -> None:
    model = build_model(spec(block("standard"), tied=False), seed=0)
    nn.init.zeros_(model.head.get_parameter("weight"))
    assert train(model, tmp_path).counted == 3
