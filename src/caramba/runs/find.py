"""Finding runs by what a user types: a directory, a name, or `latest`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from caramba.errors import ConfigError, nearest
from caramba.runs.files import sha256_of
from caramba.runs.locking import is_locked
from caramba.runs.manifest import MANIFEST, experiment_of, experiment_sha256, manifest_sha256
from caramba.runs.sources import plugin_changes
from caramba.runs.state import RESULT, list_failed_benchmarks, lost_checkpoints, select_retries

if TYPE_CHECKING:
    from caramba.config.manifest import Manifest


def resolve_run(text: str, root: Path = Path("runs")) -> Path:
    """Return the run directory that `text` means: a run, `runs/NAME` or NAME (its newest run), or `latest`.

    Raises:
        ConfigError: nothing of that name, with the nearest one.
    """
    if not text:  # a shell variable that is not set: not the folder that it is called in
        raise ConfigError(f"got '' for a run; name a directory with {MANIFEST}, or `latest`")
    if text == "latest":
        found = list_runs(root)
        if not found:
            raise ConfigError(
                f"latest: there are no runs under {root.absolute()}; start one with `caramba launch`"
            )
        return found[-1]
    path = Path(text).expanduser()
    for candidate in (path, root / text):
        if (candidate / MANIFEST).is_file():
            return candidate.absolute()
        if candidate.name == MANIFEST and candidate.is_file():
            return candidate.parent.absolute()
        runs = _runs_in(candidate)
        if runs:
            return runs[-1]
    known = list_runs(root)
    names = [f"{run.parent.name}/{run.name}" for run in known] + sorted({run.parent.name for run in known})
    hint = nearest(text.removeprefix(f"{root}/").rstrip("/"), names)
    raise ConfigError(
        f"{text}: no run there (a run is a directory with {MANIFEST}){hint or '; `latest` is the newest run'}"
    )


def find_unfinished_run(manifest: Manifest, root: Path = Path("runs")) -> Path | None:
    """Return the newest run of this same manifest that has trained, has no result, and that nobody is running."""
    digest = manifest_sha256(manifest)
    for run in reversed(_runs_in(root / manifest.name)):
        is_same = sha256_of(run / MANIFEST) == digest
        if is_same and any(run.rglob("plan.json")) and not (run / RESULT).exists() and not is_locked(run):
            return run
    return None


def find_unmeasured_run(manifest: Manifest, root: Path = Path("runs")) -> tuple[Path, tuple[str, ...]] | None:
    """Return the newest finished run of this manifest that lacks benchmarks, and those that a resume tries again.

    None where that run lacks none or more than benchmarks, has another manifest (for example resume=never), is running,
    or its weights or plugin source have changed since it ended: a resume would be refused.
    """
    experiment = experiment_sha256(manifest)
    for run in reversed(_runs_in(root / manifest.name)):
        if not (run / RESULT).exists() or experiment_of(run) != experiment:
            continue
        failed = select_retries(manifest, list_failed_benchmarks(run))
        is_same = sha256_of(run / MANIFEST) == manifest_sha256(manifest)
        if not failed or not is_same or is_locked(run) or lost_checkpoints(run):
            return None
        return None if any(plugin_changes(run, manifest)) else (run, failed)
    return None


def list_runs(root: Path = Path("runs")) -> list[Path]:
    """Return every run directory under `root`, oldest first."""
    if not root.is_dir():
        return []
    return sorted((run for name in root.iterdir() if name.is_dir() for run in _runs_in(name)), key=_age)


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted((run.absolute() for run in folder.iterdir() if (run / MANIFEST).is_file()), key=_age)


def _age(run: Path) -> tuple[int, str]:
    return (run / MANIFEST).stat().st_mtime_ns, run.name
