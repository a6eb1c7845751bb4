"""Blockwise distillation as seen by Lightning: when the blocks' losses are recorded."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from caramba.distill import BlockSchedule


class BlockwiseDistillation(pl.Callback):
    """Feeds each block's loss to the BlockSchedule at logging steps, and logs the smoothed values."""

    def __init__(self, schedule: BlockSchedule) -> None:
        self.schedule = schedule

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step % pl_module.log_every or pl_module.micro_steps:
            return
        self.schedule.record(
            {key: float(value) for key, value in outputs.items() if key.startswith("block/")}
        )
        pl_module.record({f"smoothed_{key}": value for key, value in self.schedule.smoothed().items()})

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict)
