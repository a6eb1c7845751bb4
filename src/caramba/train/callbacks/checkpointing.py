"""When a phase's state and final weights are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl


class Checkpointing(pl.Callback):
    """Saves resumable state every `save_every` optimiser steps, and the final weights when training ends.

    No state is saved at the last step: Lightning has no step left to resume there, and would never come to the
    final weights. A run stopped after it repeats the steps since the state before. The final weights are saved
    before any other work of the phase's end, so that a failure there loses nothing.
    """

    def __init__(self, state_path: Path, save_every: int | None, save_final: Callable[[], None]) -> None:
        self.state_path, self.save_every, self.save_final = state_path, save_every, save_final

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        at_step_end = pl_module.micro_steps == 0
        is_due = self.save_every and trainer.global_step % self.save_every == 0
        is_last = trainer.global_step >= trainer.max_steps or pl_module.has_converged
        if is_due and at_step_end and not is_last:
            pl_module.refuse_divergence()
            trainer.save_checkpoint(self.state_path)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.refuse_divergence()
        if trainer.global_step >= trainer.max_steps or pl_module.has_converged:
            pl_module.finish()
            if trainer.is_global_zero:
                self.save_final()
