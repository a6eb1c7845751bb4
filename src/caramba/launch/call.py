"""`caramba.launch` and `caramba.compile`: the two commands as functions that return objects and raise errors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from caramba import worker
from caramba.artifacts.across_runs.run import Run
from caramba.config.estimate import ExperimentPlan, as_json, render_text
from caramba.config.manifest import Manifest
from caramba.console import logger
from caramba.errors import CarambaError, ConfigError, quote
from caramba.launch.commands.compile import plan_of
from caramba.launch.overrides import CommandLine, as_folder
from caramba.launch.run import launch_in
from caramba.runs.exit_codes import INTERRUPTED, STOPPED
from caramba.runs.shell import show_path
from caramba.runs.state import run_state

Folders = Sequence[str | os.PathLike[str]]


class RunFailedError(CarambaError):
    """A run that did not finish. `run` holds what it left; a second launch of the same overrides resumes it."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Plan:
    """The plan of an experiment: `manifest` is what a launch would freeze, `plan` its models, stages, bytes and work.

    `notes` are what a launch would print besides.
    """

    manifest: Manifest
    plan: ExperimentPlan = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of weights of the trained model."""
        return self.plan.student.params

    def as_dict(self) -> dict[str, Any]:
        """Return what `caramba compile --json` prints."""
        return {**as_json(self.plan), "launch_notes": list(self.notes)}

    def __str__(self) -> str:
        return render_text(self.plan)


def launch(
    overrides: Sequence[str] = (),
    *,
    manifest: str | os.PathLike[str] | None = None,
    config_dirs: Folders = (),
    quiet: bool = False,
) -> Run:
    """Run an experiment as `caramba launch OVERRIDES` does, and return its run.

    The run has finished then, or waits for its SLURM job. An unfinished or finished run of the same manifest resumes;
    `resume=never` starts another. The modules of plugins are found as for the command.

    Args:
        overrides: words of the command line, such as `["model=tiny", "train.steps=50"]`.
        manifest: a single-file manifest in place of the groups.
        config_dirs: folders with options of your own, as `--config-dir` names them.
        quiet: print results and errors only.

    Raises:
        ConfigError: a mistake in the overrides; nothing has been written.
        RunFailedError: training or a benchmark failed, or a signal stopped the run.
        KeyboardInterrupt: the run was interrupted; its state is on disk.
    """
    args = _command_line(overrides, manifest, config_dirs)
    args.is_quiet = quiet
    was_quiet = logger.quiet
    try:
        run_dir, status = launch_in(args, inline=_run_raising)
    finally:
        logger.quiet = was_quiet
    if status:
        _fail(Run(run_dir), status)
    return Run(run_dir)


def compile(
    overrides: Sequence[str] = (),
    *,
    manifest: str | os.PathLike[str] | None = None,
    config_dirs: Folders = (),
) -> Plan:
    """Return the plan of an experiment, as `caramba compile` prints it. Nothing is written and torch is not loaded.

    Arguments are those of `launch`.

    Raises:
        CarambaError: what a launch would refuse too, unless only a device can tell.
    """
    found, experiment, notes = plan_of(_command_line(overrides, manifest, config_dirs))
    return Plan(found, experiment, tuple(notes))


def _command_line(
    overrides: Sequence[str], manifest: str | os.PathLike[str] | None, config_dirs: Folders
) -> CommandLine:
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(
            f"launch: overrides are a list of texts, such as ['model=tiny', 'train.steps=50']; got {quote(overrides)}"
        )
    dashed = next((word for word in overrides if word.startswith("-")), None)
    if dashed is not None:
        raise ConfigError(
            f"launch: {quote(dashed)} is an option of the command line; give KEY=VALUE, or an argument of the function"
        )
    words = [*([] if manifest is None else [f"manifest={os.fspath(manifest)}"]), *overrides]
    return CommandLine(words, [as_folder(os.fspath(folder)) for folder in config_dirs])


def _run_raising(manifest_file: Path, flags: list[str]) -> int:
    """The inline launcher, whose errors reach the caller as they are."""
    return worker.work([str(manifest_file), *flags])


def _fail(run: Run, status: int) -> NoReturn:
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    reason = run_state(run.path).error or ("stopped by a signal" if status in STOPPED else f"exit status {status}")
    raise RunFailedError(f"{show_path(run.path)}: {reason}; a launch of the same overrides resumes it", run)


__all__ = ["Plan", "RunFailedError", "compile", "launch"]
