"""Lightning logger that writes a run's own events.jsonl and metrics.csv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger

from caramba.runs.events import append_event, write_metrics


class RunLogger(Logger):
    """A logger of one phase into the run's own folder."""

    def __init__(self, run_dir: Path, phase: str) -> None:
        super().__init__()
        self.run_dir, self.phase = run_dir, phase

    @property
    def name(self) -> str:
        return self.phase

    @property
    def version(self) -> str:
        return self.run_dir.name


class EventLogger(RunLogger):
    """Appends each row of metrics as an event, and rewrites metrics.csv when asked to save."""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        append_event(self.run_dir, "hyperparameters", phase=self.phase, values={"args": str(args), **kwargs})

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        values = {key: value for key, value in metrics.items() if key != "epoch"}
        if values:
            append_event(self.run_dir, "metrics", phase=self.phase, step=step or 0, values=values)

    @rank_zero_only
    def save(self) -> None:
        write_metrics(self.run_dir)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        write_metrics(self.run_dir)
