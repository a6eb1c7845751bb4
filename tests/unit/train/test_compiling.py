"""Compiled forwards over phases that train different weights. On a GPU, where compilation takes seconds only."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from caramba.distill import LanguageModelObjective
from caramba.model import build_model
from caramba.train.callbacks.model_changes import Compilation, forget_other_graphs
from tests.unit.model.model_specs import VOCAB, transformer


def test_graphs_stay_while_the_same_weights_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a table reset the weights of one module; another module or a weight that is frozen needs new graphs."""
    resets: list[int] = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    block, other = nn.Linear(4, 4), nn.Linear(4, 4)
    for modules, n in (([block], 1), ([block], 1), ([other], 2), ([block, other], 3), ([block], 4)):
        forget_other_graphs(modules)
        assert len(resets) == n
    with torch.no_grad():
        block.weight.copy_(other.weight)
    forget_other_graphs([block])
    assert len(resets) == 4
    block.bias.requires_grad_(False)
    forget_other_graphs([block])
    assert len(resets) == 5


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_compiled_step_on_joined_products_gives_the_gradients_of_an_eager_one() -> None:
    tokens = torch.randint(VOCAB, (8, 257), generator=torch.Generator().manual_seed(0)).cuda()
    found = []
    counters.clear()
    for compiles in (False, True):
        model = build_model(transformer("gqa_scaled"), seed=0).cuda().train()
        objective = LanguageModelObjective(model)
        callback = Compilation(objective.compilable() if compiles else [])
        trainer = pl.Trainer(logger=False, enable_checkpointing=False, accelerator="gpu", devices=1)
        callback.on_fit_start(trainer, pl.LightningModule())
        loss = objective.step((tokens[:, :-1], tokens[:, 1:]), lambda value: value.backward())["loss"]
        callback.on_train_end(trainer, pl.LightningModule())
        objective.checkpoint("none")
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    assert not counters["graph_break"]
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=2e-4, atol=2e-5)
