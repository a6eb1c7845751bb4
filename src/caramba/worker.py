"""Runs one frozen manifest: `python -m caramba.worker RUN/manifest.json`. Every launcher starts exactly this."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from caramba.console import logger
from caramba.errors import CarambaError, ConfigError
from caramba.runs.ending import INTERRUPTED, end

USAGE = "usage: python -m caramba.worker RUN/manifest.json [--quiet] [--debug]"


def main(argv: list[str] | None = None) -> int:
    """Run the manifest that `argv` names and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return end(lambda: _work(words), is_debug="--debug" in words)


def _work(argv: list[str]) -> int:
    paths = [word for word in argv if not word.startswith("--")]
    unknown = [word for word in argv if word.startswith("--") and word not in ("--quiet", "--debug")]
    if len(paths) != 1 or unknown:
        raise ConfigError(f"worker: expected one manifest, got {argv}; {USAGE}")
    file = Path(paths[0]).absolute()
    run_dir = file.parent if file.suffix == ".json" else file
    if "--quiet" in argv:
        logger.quiet = True
    return run(run_dir)


def run(run_dir: Path) -> int:
    """Hold a run directory, run its manifest in it, and print where the artifacts are."""
    from caramba.runs import lock, read_manifest
    from caramba.runs.events import append_event
    from caramba.runs.state import ENDED_BADLY, ENDED_WELL, STARTED, STOPPED

    manifest = read_manifest(run_dir)
    if int(os.environ.get("RANK", "0")) > 0:  # rank 0 holds the directory and writes in it
        from caramba.experiment import run as run_experiment

        run_experiment(manifest, run_dir)
        return 0
    with lock(run_dir):
        append_event(run_dir, STARTED)
        try:
            from caramba.experiment import run as run_experiment

            results = run_experiment(manifest, run_dir)
        except CarambaError as error:
            append_event(run_dir, ENDED_BADLY, error=str(error))
            raise
        except Exception as error:
            append_event(run_dir, ENDED_BADLY, error=f"{type(error).__name__}: {error}")
            print(f"the run stopped; go on with: caramba resume {_shown(run_dir)}", file=sys.stderr)
            raise
        except KeyboardInterrupt:
            append_event(run_dir, STOPPED)
            print(f"\ninterrupted; go on with: caramba resume {_shown(run_dir)}", file=sys.stderr)
            return INTERRUPTED
        failed = [bench.id for result in results for bench in result.benchmarks if bench.error is not None]
        problem = f"benchmark {', '.join(failed)}; report.json holds the error"
        append_event(run_dir, ENDED_BADLY if failed else ENDED_WELL, **({"error": problem} if failed else {}))
    print_artifacts(run_dir)
    if failed:
        print(f"failed: {problem}", file=sys.stderr)
    return 1 if failed else 0


def print_artifacts(run_dir: Path) -> None:
    """Print the run directory, and under --quiet its artifacts too (otherwise the console has listed them)."""
    print(f"run: {_shown(run_dir)}")
    if logger.quiet:
        for file in sorted(file for file in run_dir.rglob("artifacts/*") if file.is_file()):
            print(f"  {file.relative_to(run_dir)}")


def _shown(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


if __name__ == "__main__":
    sys.exit(main())
