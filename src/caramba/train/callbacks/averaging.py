"""Gradients of several ranks come together while a phase trains, and at no other time."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch

from caramba.config.parallel import ParallelConfig
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.model.model import TiedHead
from caramba.runtime import EmbeddingGradRows, GradientAverage, takes_rows
from caramba.runtime.gradient_average import Missing
from caramba.train.callbacks.restore_on_exit import RestoreOnExit


class GradientAveraging(RestoreOnExit):
    """Gives the module what averages its gradients, `averaging`; it hooks the weights, which outlive the phase."""

    def __init__(self, parallel: ParallelConfig, phase: PhaseConfig) -> None:
        self.parallel, self.phase = parallel, phase
        self._made: GradientAverage | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # A block that is applied several times has as many backwards; a schedule decides which blocks train.
        has_blocks = self.phase.phase in BLOCK_PHASES
        missing: Missing = "zeros" if self.parallel.find_unused_parameters else "refuse"
        is_narrow = self.parallel.reduce_dtype == "bfloat16" and not (
            has_blocks or self.phase.has_16_bit_weights
        )
        trained = pl_module.objective.trainable()
        table = pl_module.model.embedder.token
        is_whole = any(parameter is table.weight for _, parameter in trained)
        rows = None
        if is_whole and not has_blocks and missing == "refuse" and takes_rows(table):
            rows = EmbeddingGradRows(table, is_tied=isinstance(pl_module.model.head, TiedHead))
        self._made = pl_module.averaging = GradientAverage(
            trained,
            group_bytes=self.parallel.bytes_at_once(sum(one.nbytes for _, one in trained)),
            narrow=torch.bfloat16 if is_narrow else None,
            missing="leave" if has_blocks else missing,
            in_backward=not has_blocks,
            rows=rows,
        )

    def restore(self) -> None:
        if self._made is not None:
            self._made.remove()
            self._made = None
