"""One launch: freeze the manifest, check what it needs, make the run directory, start the worker."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.console import logger, print_stderr
from caramba.errors import ConfigError
from caramba.launch.freeze import Frozen, freeze
from caramba.launch.launchers.process import run_in_process
from caramba.launch.launchers.slurm import check_slurm, submit_run
from caramba.launch.launchers.torchrun import check_torchrun, ranks_per_node, run_torchrun
from caramba.launch.overrides import CommandLine
from caramba.launch.preflight import check_startable
from caramba.runs import (
    MANIFEST,
    differences,
    find_unfinished_run,
    find_unmeasured_run,
    mint,
    read_manifest,
    resolve_run,
)
from caramba.runs.exit_codes import MISTAKE
from caramba.runs.files import is_locked
from caramba.runs.ranks import is_rank
from caramba.runs.shell import show_path
from caramba.runs.state import FINISHED, refuse_queued, run_state


def launch(args: CommandLine) -> int:
    """Compose, validate, make or find the run directory, run, and return the exit status."""
    return launch_in(args)[1]


def launch_in(args: CommandLine, inline: Inline | None = None) -> tuple[Path, int]:
    """Launch and return the run directory with the exit status; `inline` runs a manifest in this process."""
    inline = inline or run_inline
    if is_rank():
        return _launch_rank(args, inline)
    manifest, frozen = prepare(args.overrides, args.config_dirs)
    return start(manifest, frozen.overrides, args, inline)


def _launch_rank(args: CommandLine, inline: Inline) -> tuple[Path, int]:
    """Launch as one of the ranks that torchrun started: the first composes, and all run the same file."""
    from caramba.launch.launchers.rendezvous import refuse_launcher, shared_run_dir

    def compose_once() -> Path:
        manifest, frozen = prepare(args.overrides, args.config_dirs)
        refuse_launcher(manifest)
        return _run_directory(manifest, frozen.overrides)[0]

    run_dir = shared_run_dir(compose_once)
    return run_dir, inline(run_dir / MANIFEST, args.worker_flags)


def prepare(overrides: list[str], config_dirs: list[Path]) -> tuple[Manifest, Frozen]:
    """Return a valid manifest whose weights and data are here."""
    frozen = freeze(overrides, config_dirs)
    manifest, notes = check_startable(frozen)
    check_launcher(manifest)
    for note in notes:
        logger.warning(note)
    return manifest, frozen


def start(manifest: Manifest, overrides: tuple[str, ...], args: CommandLine, inline: Inline) -> tuple[Path, int]:
    """Write the manifest into a run directory, new or resumed, and start the worker on that file."""
    run_dir, is_new = _run_directory(manifest, overrides)
    try:
        status = start_worker(run_dir, manifest, args.worker_flags, inline)
    except ConfigError:
        if is_new:
            drop_if_nothing_began(run_dir, MISTAKE)
        raise
    if is_new:
        drop_if_nothing_began(run_dir, status)
    return run_dir, status


def _run_directory(manifest: Manifest, overrides: tuple[str, ...]) -> tuple[Path, bool]:
    """Return where a manifest runs, and whether that is new."""
    found = run_to_resume(manifest)
    if found is None:
        return mint(manifest, overrides), True
    run_dir, reason = found
    print_stderr(f"resuming {run_dir}{reason}")
    return run_dir, False


def run_to_resume(manifest: Manifest) -> tuple[Path, str] | None:
    """Return the run that a launch of this manifest would resume, and why; None for a new one.

    Raises:
        ConfigError: `resume=PATH` names no run, or one of another manifest.
    """
    if manifest.resume == "never":
        return None
    if manifest.resume != "auto":
        return _matching_run(manifest), ""
    if (unfinished := find_unfinished_run(manifest)) is not None:
        return unfinished, ", which did not finish (resume=never starts a new run)"
    if (unmeasured := find_unmeasured_run(manifest)) is None:
        return None
    run_dir, failed = unmeasured
    what = f"{'benchmarks' if len(failed) > 1 else 'benchmark'} {', '.join(failed)}"
    return run_dir, f", where {what} failed (resume=never starts a new run)"


def drop_if_nothing_began(run_dir: Path, status: int) -> bool:
    """Remove a new run that failed on its data or device before it began; return whether it was removed."""
    if status == MISTAKE and not (run_dir / "plan.json").exists() and not is_locked(run_dir):
        shutil.rmtree(run_dir)
        return True
    return False


def _matching_run(manifest: Manifest) -> Path:
    """Return the run that `resume=PATH` names when it was started from this same manifest."""
    run_dir = resolve_run(manifest.resume)
    stored = read_manifest(run_dir)
    ours, theirs = (json.loads(item.model_dump_json(exclude={"resume"})) for item in (manifest, stored))
    changed = list(differences(theirs, ours))
    if changed:
        shown = "\n  ".join(changed[:10])
        more = f"\n  … and {len(changed) - 10} more" if len(changed) > 10 else ""
        raise ConfigError(
            f"resume={manifest.resume}: that run was started from another manifest:\n  {shown}{more}\n"
            f"Resume it unchanged (caramba resume {show_path(run_dir)}), or leave out resume= to start a new run"
        )
    return run_dir


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
    if kind == "torchrun" or (kind == "inline" and strategy != "single"):
        check_torchrun(manifest, is_plan=is_plan)
    elif manifest.launcher.is_slurm:
        check_slurm(manifest)


def start_worker(run_dir: Path, manifest: Manifest, flags: list[str], inline: Inline | None = None) -> int:
    """Start the worker by the manifest's launcher, and return its exit status.

    `inline` runs a manifest in this process; by default `run_inline`.
    """
    kind, is_single = manifest.launcher.type, manifest.parallel.strategy == "single"
    refuse_queued(run_dir)
    if is_rank() or (kind == "inline" and (is_single or ranks_per_node(manifest) == 1)):
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
