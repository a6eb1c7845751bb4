"""Weights & Biases under the optimiser's own step, so that a row is sent once whatever stops the run."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import WandbLogger

from caramba.config.manifest import LoggerConfig, SettingsConfig

STEP = "trainer/global_step"


class WandbStream(WandbLogger):
    """Lightning's logger, with W&B's step set to the optimiser's: W&B drops a row below the last step that it has."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        at = step or 0
        if at >= self.experiment.step:  # of a resumed online run: what the server has need not be sent again
            self.experiment.log({**metrics, STEP: at}, step=at)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the W&B run: the next phase has one of its own, and a process holds one at a time."""
        super().finalize(status)
        if self._experiment is not None:
            self._experiment.finish(exit_code=0 if status == "success" else 1)
            self._experiment = None


def open_wandb(config: LoggerConfig, settings: SettingsConfig, run_dir: Path, phase: str) -> WandbStream:
    """Open the W&B run of a phase, under an id of its own that a resumed run keeps.

    An offline folder that an interrupted process left is removed: its rows are sent again from events.jsonl, so that
    one folder holds the whole phase.
    """
    os.environ.setdefault("WANDB_SILENT", "true")  # its console lines repeat ours, in colours
    identity = f"{run_dir.name}-{phase}"
    if config.wandb_mode == "offline":
        for left in (run_dir / "wandb").glob(f"offline-run-*-{identity}"):
            shutil.rmtree(left)
    return WandbStream(
        project=settings.wandb_project,
        entity=settings.wandb_entity,
        save_dir=str(run_dir),
        name=f"{run_dir.parent.name}-{run_dir.name}-{phase}",
        id=identity,
        resume="allow",
        mode=config.wandb_mode,
    )
