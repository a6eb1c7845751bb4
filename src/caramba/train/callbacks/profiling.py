"""`debug=profile` as seen by Lightning: where a phase and its steps begin and end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from caramba.console import logger
from caramba.train.throughput import PhaseProfile


class Profiling(pl.Callback):
    """Profiles a few steady steps of the phase and logs the path of the files."""

    def __init__(self, folder: Path, phase: str) -> None:
        self.folder, self.phase = folder, phase
        self._profile: PhaseProfile | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            left = trainer.max_steps - trainer.global_step
            self._profile = PhaseProfile(self.folder, self.phase, left, trainer.strategy.root_device)
            self._profile.start()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._profile is not None and pl_module.micro_steps == 0:
            self._profile.begin_step()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is not None and pl_module.micro_steps == 0:
            self._profile.end_step()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            if profile.has_written:
                logger.path(self.folder, "profile")
            else:
                logger.warning(
                    f"{self.phase}: ended before its profiled steps; nothing is written, raise debug.max_steps"
                )

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
