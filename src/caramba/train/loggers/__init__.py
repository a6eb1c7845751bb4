"""Where the metrics of a phase go. events.jsonl is the record; every other stream is made from the same rows."""

from __future__ import annotations

import shutil
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger

from caramba.config.manifest import LoggerConfig, SettingsConfig
from caramba.runs.events import drop_metrics_after, metric_rows
from caramba.runtime import is_main_process
from caramba.train.loggers.events import EventLogger
from caramba.train.loggers.hdf5 import Hdf5Logger

__all__ = ["EventLogger", "Hdf5Logger", "build_loggers"]


def build_loggers(
    config: LoggerConfig, settings: SettingsConfig, run_dir: Path, phase: str, step: int = 0
) -> list[Logger]:
    """Build the loggers of a phase that resumes after `step`: events and CSV always, the others as configured.

    An interrupted process may have recorded steps after the state that the phase resumes from. Those rows are dropped
    from events.jsonl, and TensorBoard and W&B begin again with the rows that stay, so that each stream has every step
    once, as do CSVLogger and loggers of plugins. Other loggers continue with the next row. metrics.h5 is made
    from events.jsonl with the next row.
    """
    if is_main_process():
        drop_metrics_after(run_dir, phase, step)
    streams: list[Logger] = []
    if config.tensorboard:
        if is_main_process():
            shutil.rmtree(run_dir / "tensorboard" / phase, ignore_errors=True)
        streams.append(TensorBoardLogger(save_dir=str(run_dir), name="tensorboard", version=phase))
    if config.wandb:
        from caramba.train.loggers.wandb import open_wandb

        streams.append(open_wandb(config, settings, run_dir, phase))
    named: list[Logger] = []
    if config.lightning:
        from caramba.train.loggers.named import build_named_loggers

        named, local = build_named_loggers(config.lightning, run_dir, phase)
        streams += local
        named = [logger for logger in named if logger not in local]
    if config.extra:
        from caramba.train.extensions import build_metric_loggers

        streams += build_metric_loggers(config.extra, run_dir, phase)
    for of, at, values in metric_rows(run_dir):
        if of == phase:
            for stream in streams:
                stream.log_metrics(values, step=at)
    hdf5 = [Hdf5Logger(run_dir, phase)] if config.hdf5 else []
    return [EventLogger(run_dir, phase), *hdf5, *streams, *named]
