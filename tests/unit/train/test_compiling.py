"""Compiled forwards over phases that train different weights. On a GPU, where compilation takes seconds only."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from caramba.train.callbacks.compiling import Compilation


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_weight_that_one_phase_freezes_trains_in_the_next() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    frozen, x = block[0].weight, torch.randn(4, 8, device="cuda")
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="gpu", devices=1)
    for trains in (False, True, False):
        frozen.requires_grad_(trains)
        phase = Compilation([block])
        phase.on_fit_start(trainer, pl.LightningModule())
        block.zero_grad(set_to_none=True)
        block(x).sum().backward()
        phase.on_train_end(trainer, pl.LightningModule())
        assert (frozen.grad is not None) is trains
        assert block[1].weight.grad is not None
