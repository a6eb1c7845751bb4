"""Where the metrics of a phase go."""

from __future__ import annotations

import os
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger

from caramba.config.manifest import LoggerConfig, SettingsConfig
from caramba.train.loggers.events import EventLogger

__all__ = ["EventLogger", "build_loggers"]


def build_loggers(config: LoggerConfig, settings: SettingsConfig, run_dir: Path, phase: str) -> list[Logger]:
    """Build the loggers of one phase: events and CSV always, TensorBoard and W&B as configured."""
    loggers: list[Logger] = [EventLogger(run_dir, phase)]
    if config.tensorboard:
        loggers.append(TensorBoardLogger(save_dir=str(run_dir), name="tensorboard", version=phase))
    if config.wandb:
        os.environ.setdefault("WANDB_SILENT", "true")  # its console lines repeat ours, in colours
        loggers.append(
            WandbLogger(
                project=settings.wandb_project,
                entity=settings.wandb_entity,
                save_dir=str(run_dir),
                name=f"{run_dir.parent.name}-{run_dir.name}-{phase}",
                id=f"{run_dir.name}-{phase}",
                resume="allow",
                mode=config.wandb_mode,
            )
        )
    return loggers
