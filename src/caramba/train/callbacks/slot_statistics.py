"""How memory slots are used, measured at every validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from caramba.model import Model
from caramba.model.memory import STATISTICS

ROWS = 8
"""Sequences of the first held-out batch that are measured."""


class SlotStatistics(pl.Callback):
    """Records `memory_KEY` of a model's memory slots after each validation, on the first rows of held-out text.

    `write` gets the step and the read mass per slot, by layer. More than half of the slots dead is warned of once.
    """

    def __init__(self, model: Model, write: Callable[[int, dict[str, list[list[float]]]], None]) -> None:
        self.model, self.write = model, write
        self._tokens: Tensor | None = None

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            self._tokens = batch[0][:ROWS]

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self._tokens is None or pl_module.has_stages or not trainer.is_global_zero:
            return
        stats = self.model.get_memory_stats(self._tokens)
        pl_module.record({f"memory_{key.removeprefix('memory_')}": stats[key] for key in STATISTICS})
        by_layer = {name: use["read_mass"].tolist() for name, use in stats["layers"].items()}
        self.write(trainer.global_step, by_layer)
