"""Blockwise distillation as seen by Lightning: when the schedule advances and what it says is recorded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from caramba.distill import BlockSchedule


class BlockwiseDistillation(pl.Callback):
    """Tells the BlockSchedule of each optimiser step, logs its smoothed losses, and ends the phase when it is done."""

    def __init__(self, schedule: BlockSchedule) -> None:
        self.schedule = schedule

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.micro_steps:
            return
        is_logged = trainer.global_step % pl_module.log_every == 0
        if is_logged or self.schedule.needs_losses:  # reading losses waits for the device
            names = self.schedule.active()
            losses = {name: float(outputs[f"block/{name}"]) for name in names}
            self.schedule.advance(losses)
        else:
            self.schedule.advance()
        if is_logged:
            smoothed = self.schedule.smoothed()
            pl_module.record({f"smoothed_block/{name}": value for name, value in smoothed.items()})
        if self.schedule.is_done:
            pl_module.has_converged = trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict)
