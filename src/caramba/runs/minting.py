"""Run directories: made once per run by the front end, and found by what a user types."""

from __future__ import annotations

import datetime
import functools
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from caramba.console import print_stderr
from caramba.errors import CarambaError, ConfigError, nearest
from caramba.runs.environment import (
    ENVIRONMENT,
    GIT_PATCH,
    GIT_PATCH_SWITCH,
    environment,
    git_patch,
    stores_git_patch,
)
from caramba.runs.events import EVENTS
from caramba.runs.files import LOCK, is_locked, mark_starting, sha256_of, write_json, write_whole
from caramba.runs.manifest import (
    MANIFEST,
    OVERRIDES,
    SOURCES,
    canonical_json,
    experiment_of,
    experiment_sha256,
    manifest_sha256,
    plugin_changes,
)
from caramba.runs.state import (
    FAILED,
    RESULT,
    list_failed_benchmarks,
    lost_checkpoints,
    run_state,
    select_retries,
)

if TYPE_CHECKING:
    from caramba.config.manifest import Manifest


MOST_COLLISIONS = 1000
MINTED = re.compile(r"\d{8}-\d{6}-([0-9a-f]{8})(-\d+)?")
_WRITTEN_BEFORE_A_PLAN = {"logs", *(OVERRIDES, ENVIRONMENT, GIT_PATCH, MANIFEST, LOCK, EVENTS, SOURCES)}


def mint(manifest: Manifest, overrides: Iterable[str], root: Path = Path("runs")) -> Path:
    """Create `root/<name>/<UTC time>-<manifest hash 8>/` and write what the run starts from.

    The directory holds manifest.json, overrides.txt, env.json, and git.patch when the current folder is a git
    repository with changes. The manifest is written last: a directory that has one is complete. What an earlier start
    of the same manifest left, which was killed before anything began, is used again.

    Raises:
        CarambaError: the folder cannot be written.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    parent = (root / manifest.name).absolute()
    digest = manifest_sha256(manifest)
    run_dir: Path | None = None
    try:
        run_dir = _leftover(parent, digest) or reserve_folder(parent, f"{stamp}-{digest[:8]}")
        patch = git_patch()
        write_whole(run_dir / OVERRIDES, "".join(f"{word}\n" for word in overrides))
        write_json(run_dir / "env.json", environment())
        if patch and stores_git_patch():
            _write_patch(run_dir / GIT_PATCH, patch)
        write_whole(run_dir / MANIFEST, canonical_json(manifest))
    except BaseException as error:
        if run_dir is not None:
            shutil.rmtree(run_dir, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CarambaError(
            f"{parent}: cannot make a run directory: {error.strerror}; free space, or start from another folder"
        ) from None
    return run_dir


def _leftover(parent: Path, digest: str) -> Path | None:
    """Return a folder that a killed start of the same manifest left before anything began, emptied; None without one.

    Folders of live processes, those of runs that failed, and those that hold anything else stay as they are.
    """
    for folder in sorted(parent.iterdir()) if parent.is_dir() else ():
        name, file = MINTED.fullmatch(folder.name), folder / MANIFEST
        if name is None or name[1] != digest[:8] or not _is_untouched(folder):
            continue
        if file.is_file() and (sha256_of(file) != digest or run_state(folder).state == FAILED):
            continue
        if is_locked(folder) or not mark_starting(folder):
            continue
        for item in folder.iterdir():
            shutil.rmtree(item) if item.is_dir() else item.unlink()
        return folder
    return None


def _is_untouched(folder: Path) -> bool:
    """Whether a folder holds nothing but what a start writes before its run plans anything."""
    for item in folder.iterdir():
        name = item.name
        is_part = name.startswith(".") and name.endswith(".part")
        if not is_part and name not in _WRITTEN_BEFORE_A_PLAN:
            return False
    return True


def _write_patch(file: Path, patch: bytes) -> None:
    """Write uncommitted changes, which may hold keys, for the user alone; say so once in a process."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as stream:
        stream.write(patch)
    _announce_once()


@functools.cache
def _announce_once() -> None:
    print_stderr(
        f"uncommitted changes of this git repository are stored in each run's {GIT_PATCH} (readable by you alone); "
        f"{GIT_PATCH_SWITCH}=off leaves them out"
    )


def reserve_folder(parent: Path, base: str, what: str = "runs") -> Path:
    """Make the first free of base, base-2, base-3 …; mkdir is atomic, so two processes never share one.

    Raises:
        CarambaError: all of them exist; `what` names what they are.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, MOST_COLLISIONS):
        run_dir = parent / (base if number == 1 else f"{base}-{number}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            continue
        if mark_starting(run_dir):  # Else another start took the empty folder for a leftover.
            return run_dir
    raise CarambaError(
        f"{parent}/{base}: {MOST_COLLISIONS} {what} of this second exist; something starts {what} in a loop"
    )


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
            raise ConfigError(f"latest: there are no runs under {root.absolute()}; start one with `caramba launch`")
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


def runs_below(folder: Path) -> list[Path]:
    """Return the runs of a folder: of `runs`, of `runs/NAME`, or the one that it is."""
    if (folder / MANIFEST).is_file():
        return [folder.absolute()]
    here = sorted(item.absolute() for item in folder.iterdir() if (item / MANIFEST).is_file())
    return here or list_runs(folder)


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
