"""`caramba rerun RUN | FILE`: a run's manifest again from its start, in a directory of its own."""

from __future__ import annotations

from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.console import print_stderr
from caramba.errors import ConfigError
from caramba.launch.overrides import parse_command
from caramba.launch.preflight import check_extras, check_weights
from caramba.launch.run import check_launcher, drop_if_nothing_began, run_inline, start_worker
from caramba.runs import MANIFEST, mint, read_manifest, resolve_run
from caramba.runs.environment import environment_changes
from caramba.runs.manifest import plugin_changes, read_overrides
from caramba.runs.ranks import is_rank
from caramba.runs.shell import show_path
from caramba.runs.state import RESULT


def main(argv: list[str]) -> int:
    """Run `caramba rerun ARGV` and return its exit status."""
    args = parse_command(argv)
    if len(args.overrides) != 1 or "=" in args.overrides[0]:
        raise ConfigError(
            "rerun: expected one run, which is run again unchanged: caramba rerun RUN (a directory, runs/NAME, latest, "
            "or a manifest.json)"
        )
    return rerun(args.overrides[0], args.worker_flags)


def rerun(text: str, flags: list[str]) -> int:
    """Run the manifest of a run again from its start, in a directory of its own; return the exit status.

    `text` is a run, or a copy of its manifest.json. Changes since then in packages, machine or code are printed first.
    Rank 0 makes the directory.

    Raises:
        CarambaError: weights that it names are missing, or a key is not implemented.
    """
    if is_rank():
        from caramba.launch.launchers.rendezvous import shared_run_dir

        return run_inline(shared_run_dir(lambda: _copy(text)[1]) / MANIFEST, flags)
    folder, run_dir, manifest = _copy(text)
    status = start_worker(run_dir, manifest, flags)
    if not drop_if_nothing_began(run_dir, status) and (folder / RESULT).is_file():
        print_stderr(f"compare with: caramba compare {show_path(folder)} {show_path(run_dir)}")
    return status


def _copy(text: str) -> tuple[Path, Path, Manifest]:
    """Return the folder of a manifest that can run, a new run directory that holds the same, and the manifest."""
    file = Path(text).expanduser()
    source = file if file.is_file() else resolve_run(text)
    manifest = check_weights(read_manifest(source))
    check_extras(manifest)
    check_launcher(manifest)
    folder = source.parent if source.is_file() else source
    for line in (*environment_changes(folder), *plugin_changes(folder, manifest)):
        print_stderr(f"differs from the original: {line}")
    run_dir = mint(manifest, read_overrides(folder))
    print_stderr(f"running {folder} again in {run_dir}")
    return folder, run_dir, manifest
