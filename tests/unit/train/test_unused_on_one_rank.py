"""Ranks that use other weights in a step make the same exchanges in the same order, and keep the same weights."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.distill import Batch, LanguageModelObjective
from caramba.model import build_model
from caramba.optim import NonFiniteWatch
from caramba.train.callbacks import GradientAveraging
from caramba.train.module import CarambaModule
from caramba.train.strategies import AVERAGED, strategy_arguments
from tests.preloaded import start_ranks
from tests.ranks import leave_together, meet
from tests.unit.model.model_specs import NORM, VOCAB, spec

RANKS, STEPS = 2, 3


class Halved(LanguageModelObjective):
    """Rank 1 goes from the embedding to the head, past all blocks."""

    def step(self, batch: Batch, backward: Any) -> dict[str, Tensor]:
        if dist.get_rank() == 0:
            return super().step(batch, backward)
        losses = self.losses_of(self.model.embedder(batch[0]), batch[1])
        backward(losses.loss)
        return {"loss": losses.loss.detach()}


class Means(pl.Callback):
    """The losses of all steps, which are means over ranks."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(float(outputs["loss"]))


def rank_main(rank: int, folder: str) -> None:
    meet(rank, folder, RANKS, timedelta(minutes=5))
    tokens = torch.randint(VOCAB, (STEPS, 9), generator=torch.Generator().manual_seed(rank))
    windows = torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])
    phase = PhaseConfig(phase="pretrain", steps=STEPS, lr=1e-2, block_size=8, batch_size=1)
    parallel = ParallelConfig(strategy="ddp", dp=RANKS, find_unused_parameters=True)
    places, who = strategy_arguments(parallel, AVERAGED, torch.device("cpu"))
    means = Means()
    trainer = pl.Trainer(
        accelerator="cpu",
        **places,
        plugins=who,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[GradientAveraging(parallel, phase), means],
    )
    module = CarambaModule(
        Halved(build_model(spec(NORM), seed=0)),
        phase,
        NonFiniteWatch(phase, Path(folder), "pretrain", lambda _: ()),
        way=AVERAGED,
    )
    before = [parameter.detach().clone() for parameter in module.model.parameters()]
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(windows, batch_size=1)
    trainer.fit(module, loader)
    held = [parameter.detach() for parameter in module.model.parameters()]
    assert not any(torch.equal(x, y) for x, y in zip(held, before, strict=True)), "rank 0 has used every weight"
    assert len(means.found) == STEPS
    for value in (*held, torch.tensor(means.found)):
        others = [torch.empty_like(value) for _ in range(RANKS)]
        dist.all_gather(others, value.contiguous())
        assert torch.equal(others[0], others[1])
    leave_together()


def test_a_rank_that_leaves_weights_out_trains_with_one_that_does_not(tmp_path: Path) -> None:
    start_ranks(rank_main, (str(tmp_path),), RANKS)
