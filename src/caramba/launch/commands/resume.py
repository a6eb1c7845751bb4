"""`caramba resume RUN | SWEEP`: an interrupted run or sweep, from what it has saved."""

from __future__ import annotations

from pathlib import Path

from caramba.console import print_stderr
from caramba.errors import ConfigError
from caramba.launch.overrides import parse_command
from caramba.launch.run import check_launcher, start_worker
from caramba.launch.sweeps.runner import runner_of
from caramba.runs import read_manifest, resolve_run
from caramba.runs.state import FINISHED, run_state
from caramba.runs.sweeps import Sweep, is_sweep, read_sweep


def main(argv: list[str]) -> int:
    """Run `caramba resume ARGV` and return its exit status."""
    args = parse_command(argv)
    if len(args.overrides) != 1 or "=" in args.overrides[0]:
        raise ConfigError(
            "resume: expected one run, which resumes unchanged: caramba resume RUN (a directory, runs/NAME, or latest; "
            "or the directory of a sweep)"
        )
    return resume(args.overrides[0], args.worker_flags)


def resume(text: str, flags: list[str]) -> int:
    """Resume a run, or the sweep that `text` names; return the exit status."""
    folder = Path(text).expanduser()
    if is_sweep(folder):
        return _resume_sweep(read_sweep(folder), flags)
    run_dir = resolve_run(text)
    manifest = read_manifest(run_dir)
    check_launcher(manifest)
    if run_state(run_dir).state == FINISHED and not manifest.launcher.is_slurm:
        print_stderr(
            f"{run_dir} has finished: nothing is left to do but its artifacts; caramba rerun does all of it again"
        )
    return start_worker(run_dir, manifest, flags)


def _resume_sweep(sweep: Sweep, flags: list[str]) -> int:
    """Resume a sweep as it was frozen; return its exit status."""
    if "search" in sweep.settings:
        from caramba.launch.sweeps.search import resume_search

        return resume_search(sweep, flags)
    if not sweep.points:
        raise ConfigError(f"{sweep.folder}: a sweep without points; start it again with -m")
    return runner_of(sweep, sweep.manifest(sweep.points[0]), flags).resume()
