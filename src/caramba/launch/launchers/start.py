"""Start the worker of a frozen manifest where its launcher says: in this process, a process, torchrun or SLURM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.errors import ConfigError
from caramba.launch.launchers.process import run_in_process
from caramba.launch.launchers.slurm import check_slurm, submit_run
from caramba.launch.launchers.torchrun import check_torchrun, ranks_per_node, run_torchrun
from caramba.runs import MANIFEST
from caramba.runs.jobs import refuse_queued
from caramba.runs.ranks import is_rank
from caramba.runs.state import FINISHED, run_state

Inline = Callable[[Path, list[str]], int]
"""Runs a manifest file with flags in this process and returns the exit status."""


def check_launcher(manifest: Manifest, *, is_plan: bool = False) -> None:
    """Check that what starts the worker is here; for a plan the number of GPUs does not count.

    Raises:
        ConfigError: naming the program that is missing, or the ranks that cannot be.
    """
    kind, strategy = manifest.launcher.type, manifest.parallel.strategy
    if kind == "process" and strategy != "single":
        raise ConfigError(
            f"launcher=process: it starts one process for each run, and parallel={strategy} is a run of several ranks; "
            "use launcher=torchrun or slurm, or parallel=single"
        )
    if kind in ("inline", "torchrun"):
        check_torchrun(manifest, is_plan=is_plan)
    elif manifest.launcher.is_slurm:
        check_slurm(manifest)


def start_worker(run_dir: Path, manifest: Manifest, flags: list[str], inline: Inline | None = None) -> int:
    """Start the worker where the manifest's launcher says, and return its exit status.

    `inline` runs a manifest in this process; by default `run_inline`.
    """
    kind = manifest.launcher.type
    refuse_queued(run_dir)
    if is_rank() or (kind == "inline" and ranks_per_node(manifest) == 1):
        return (inline or run_inline)(run_dir / MANIFEST, flags)
    if kind in ("inline", "torchrun"):
        return run_torchrun(run_dir, manifest, flags)
    if manifest.launcher.is_slurm:
        if run_state(run_dir).state == FINISHED:
            print(f"{run_dir} has finished; there is nothing to submit")
            return 0
        return submit_run(run_dir, manifest, flags)
    return run_in_process(run_dir, manifest.launcher, manifest.device, flags)


def run_inline(manifest_file: Path, flags: list[str]) -> int:
    """The inline launcher: the worker in this process. The file is all that is handed over."""
    import caramba.worker as worker

    return worker.main([str(manifest_file), *flags])
