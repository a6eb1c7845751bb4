"""Runs one frozen manifest: `python -m caramba.worker RUN/manifest.json`. Every launcher starts exactly this.

Several ranks run the same file, under torchrun's variables or as the tasks of a SLURM step: the first holds the run
and records what happens to it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from caramba.console import logger, print_stderr
from caramba.errors import CarambaError, ConfigError, Preempted
from caramba.runs.exit_codes import (
    INTERRUPTED,
    PREEMPTED,
    exit_process,
    imports_without_gc,
    run_command,
    status_of,
    stop_on_signals,
)
from caramba.runs.ranks import adopt_slurm_ranks, end_with_agent, rank
from caramba.runs.shell import show_path

if TYPE_CHECKING:
    from caramba.config.manifest import Manifest

USAGE = "usage: python -m caramba.worker RUN/manifest.json [--quiet] [--debug]"


def main(argv: list[str] | None = None) -> int:
    """Run the manifest that `argv` names and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: work(words), is_debug="--debug" in words)


def work(argv: list[str]) -> int:
    """Run the manifest that `argv` names; errors are raised."""
    paths = [word for word in argv if not word.startswith("--")]
    unknown = [word for word in argv if word.startswith("--") and word not in ("--quiet", "--debug")]
    if len(paths) != 1 or unknown:
        raise ConfigError(f"worker: expected one manifest, got {argv}; {USAGE}")
    file = Path(paths[0]).absolute()
    run_dir = file.parent if file.suffix == ".json" else file
    adopt_slurm_ranks()
    end_with_agent()
    if "--quiet" in argv or rank() != 0:
        logger.quiet = True
    return run(run_dir)


def run(run_dir: Path) -> int:
    """Hold a run directory, run its manifest in it, and print where the artifacts are."""
    from caramba.runs.environment import rewrite_machine
    from caramba.runs.events import append_event
    from caramba.runs.files import lock, remove_parts
    from caramba.runs.manifest import check_manifest_unchanged, check_plugins, read_manifest
    from caramba.runs.state import (
        ENDED_BADLY,
        ENDED_WELL,
        REQUEUE,
        STARTED,
        STOPPED,
        clock_skew,
        current_job,
        record_job,
        select_retries,
    )

    manifest = read_manifest(run_dir)
    if rank() > 0:
        return _follow(manifest, run_dir)
    with stop_on_signals(), lock(run_dir):
        remove_parts(run_dir)
        if skew := clock_skew(run_dir):
            logger.warning(skew)
        if current_job() is not None:
            record_job(run_dir)
            (run_dir / REQUEUE).unlink(missing_ok=True)
            if not (run_dir / "plan.json").exists():
                rewrite_machine(run_dir)
        try:
            # Refused here, a run is what it was before: one that has finished still has.
            check_manifest_unchanged(run_dir)
            check_plugins(run_dir, manifest)
        except CarambaError as error:
            _tell_agent(error)
            raise
        append_event(run_dir, STARTED)
        try:
            with imports_without_gc():
                from caramba.experiment.run import run as run_experiment

            results = run_experiment(manifest, run_dir)
        except CarambaError as error:
            _tell_agent(error)
            append_event(run_dir, ENDED_BADLY, error=str(error))
            raise
        except Exception as error:
            _tell_agent(error)
            append_event(run_dir, ENDED_BADLY, error=f"{type(error).__name__}: {error}")
            print_stderr(f"the run stopped; continue with: caramba resume {show_path(run_dir)}")
            raise
        except KeyboardInterrupt:
            append_event(run_dir, STOPPED)
            print_stderr(f"\ninterrupted; continue with: caramba resume {show_path(run_dir)}")
            return INTERRUPTED
        except Preempted as stop:
            append_event(run_dir, STOPPED, signal=stop.signal_name)
            print_stderr(f"stopped by {stop.signal_name}; continue with: caramba resume {show_path(run_dir)}")
            status = status_of(stop)
            if status == PREEMPTED and current_job() is not None:
                (run_dir / REQUEUE).touch()
            return status
        failed = [bench.id for result in results for bench in result.benchmarks if bench.error is not None]
        problem = f"benchmark {', '.join(failed)}; report.json holds the error"
        append_event(run_dir, ENDED_BADLY if failed else ENDED_WELL, **({"error": problem} if failed else {}))
    print_artifacts(run_dir)
    if failed:
        again = select_retries(manifest, failed)
        hint = f"; to try {', '.join(again)} again: caramba resume {show_path(run_dir)}" if again else ""
        print_stderr(f"failed: {problem}{hint}")
    return 1 if failed else 0


def _follow(manifest: Manifest, run_dir: Path) -> int:
    """Train with rank 0, which holds the directory and writes in it."""
    with stop_on_signals(follows=True):
        try:
            with imports_without_gc():
                from caramba.experiment.run import run as run_experiment

            run_experiment(manifest, run_dir)
        except (Preempted, KeyboardInterrupt):
            return 0  # rank 0 reports how the run ended; a bad status here would kill it before it does
        except Exception as error:
            _tell_agent(error)
            raise
    return 0


def _tell_agent(error: BaseException) -> None:
    """Say to the elastic agent that started this rank what it failed with and when: it looks for the first of all."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now = time.time()
        extra = {"timestamp": str(int(now)), "py_callstack": ""}
        said = {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}, "time": now}
        Path(file).write_text(json.dumps(said), encoding="utf-8")


def print_artifacts(run_dir: Path) -> None:
    """Print the run directory, and under --quiet its artifacts too (otherwise the console has listed them)."""
    print(f"run: {show_path(run_dir)}")
    if logger.quiet:
        for file in sorted(file for file in run_dir.rglob("artifacts/*") if file.is_file()):
            print(f"  {file.relative_to(run_dir)}")


if __name__ == "__main__":
    exit_process(main())
