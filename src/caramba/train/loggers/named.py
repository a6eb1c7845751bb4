"""Loggers of Lightning by class name, such as MLflow and Comet, with arguments of the manifest; and W&B."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import loggers
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import Logger

from caramba.config.manifest import LoggerConfig, SettingsConfig
from caramba.errors import ConfigError, nearest, one_line

PACKAGES = {
    "CometLogger": "comet_ml",
    "LitLogger": "litlogger",
    "MLFlowLogger": "mlflow",
    "NeptuneLogger": "neptune",
}
LOCAL = ("CSVLogger",)
"""Loggers that write a folder of the run, which a resumed phase writes again from the first step."""


def check_named_loggers(configs: Mapping[Any, Mapping[str, Any]]) -> None:
    """Check the loggers of a manifest before anything trains.

    Raises:
        ConfigError: a package is not installed, an argument does not exist, with the nearest name, or nothing would
            be written.
    """
    for name, arguments in configs.items():
        if name == "CometLogger" and arguments.get("online") is False:
            raise ConfigError(
                "logger.lightning.CometLogger.online=false: Lightning disables the experiment then, so nothing is "
                "written; leave it out, or name CSVLogger"
            )
        package = PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger.lightning.{name}: needs {package}, which is not installed; pip install {package}"
            )
        parameters = _parameters(name)
        takes_any = any(item.kind is item.VAR_KEYWORD for item in parameters.values())
        for key in arguments:
            if key not in parameters and not takes_any:
                raise ConfigError(
                    f"logger.lightning.{name}.{key}: unknown argument{nearest(key, parameters) or ';'} known: "
                    f"{', '.join(parameters)}"
                )


def build_named_loggers(
    configs: Mapping[Any, Mapping[str, Any]], run_dir: Path, phase: str
) -> tuple[list[Logger], list[Logger]]:
    """Return the loggers of a phase, and those among them that begin again with its first row.

    `save_dir` is the run, and names default to those of run and phase.

    Raises:
        ConfigError: a logger cannot begin, with its own reason.
    """
    found: list[Logger] = []
    local: list[Logger] = []
    for name, arguments in configs.items():
        defaults = {
            "save_dir": str(run_dir),
            "run_name": f"{run_dir.name}-{phase}",
            "experiment_name": run_dir.parent.name,
        }
        if name in LOCAL:
            defaults |= {"name": "csv", "version": phase}
            shutil.rmtree(run_dir / "csv" / phase, ignore_errors=True)
        known = _parameters(name)
        values = {key: value for key, value in defaults.items() if key in known} | dict(arguments)
        try:
            found.append(getattr(loggers, name)(**values))
        except Exception as error:  # of a library, whose own classes are not known here
            raise ConfigError(
                f"logger.lightning.{name}: cannot begin ({type(error).__name__}: {one_line(error)}); "
                "correct its arguments or environment, then resume"
            ) from error
        if name in LOCAL:
            local.append(found[-1])
    return found, local


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    parameters = dict(inspect.signature(getattr(loggers, name).__init__).parameters)
    parameters.pop("self")
    return parameters


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
