"""Blockwise distillation as seen by Lightning: when the schedule is logged and saved, and that it may end the phase."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from caramba.distill import BlockSchedule


class BlockwiseDistillation(pl.Callback):
    """Logs the BlockSchedule's smoothed losses, keeps its state with the training state, stops when it is done.

    The objective itself advances the schedule, within the step, so that whatever saves after it saves the same.
    """

    def __init__(self, schedule: BlockSchedule) -> None:
        self.schedule = schedule

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.micro_steps:
            return
        if trainer.global_step % pl_module.log_every == 0:
            smoothed = self.schedule.block_losses()
            pl_module.record({f"smoothed_block/{name}": value for name, value in smoothed.items()})
        if self.schedule.is_done:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict)
