"""What ends a phase before its last step: a held-out loss that no longer falls, its time, or blocks that converged."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, Timer

from caramba.config.trainer import EarlyStoppingConfig, TrainerConfig
from caramba.distill import BlockSchedule


class HeldOutStopping(EarlyStopping):
    """Lightning's EarlyStopping on the held-out loss."""

    def __init__(self, config: EarlyStoppingConfig) -> None:
        super().__init__(
            monitor=config.monitor,
            min_delta=config.min_delta,
            patience=config.patience,
            stopping_threshold=config.stopping_threshold,
            divergence_threshold=config.divergence_threshold,
        )
        self.reason = ""

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        was_stopping = trainer.should_stop
        super().on_validation_end(trainer, pl_module)
        if trainer.should_stop and not was_stopping:
            self.reason = f"early stopping, lowest held-out loss {float(self.best_score):.4f}"


class TimeLimit(Timer):
    """Lightning's Timer, which looks at the clock after whole steps alone."""

    def __init__(self, limit: str) -> None:
        super().__init__(duration=limit, interval="step", verbose=False)
        self.limit = limit
        self.reason = ""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.lightning_module.micro_steps == 0:
            super().on_train_batch_end(trainer, *args, **kwargs)
            if trainer.should_stop and not self.reason and (self.time_remaining() or 0.0) <= 0:
                self.reason = f"trainer.max_time={self.limit}"


def stopping_callbacks(config: TrainerConfig) -> list[HeldOutStopping | TimeLimit]:
    """Return the callbacks that `trainer.early_stopping` and `trainer.max_time` ask for."""
    found: list[HeldOutStopping | TimeLimit] = []
    if config.early_stopping is not None:
        found.append(HeldOutStopping(config.early_stopping))
    if config.max_time is not None:
        found.append(TimeLimit(config.max_time))
    return found


class BlockwiseDistillation(pl.Callback):
    """Logs the BlockSchedule's smoothed losses, keeps its state with the training state, stops when it is done.

    The objective itself advances the schedule, within the step, so that whatever saves after it saves the same.
    """

    def __init__(self, schedule: BlockSchedule) -> None:
        self.schedule = schedule

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
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
