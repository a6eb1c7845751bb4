"""The archive of runs: `runs/.archive/NAME/RUN`, where `caramba rm` moves a run, and from where it comes back whole."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from caramba.errors import ConfigError, nearest
from caramba.runs.files import lock
from caramba.runs.manifest import MANIFEST, OVERRIDES
from caramba.runs.minting import list_runs

ARCHIVE, LOG = ".archive", "log.jsonl"


@dataclass(frozen=True)
class Archived:
    """A run in the archive; `batch` is equal for those that one command moved, later ones are higher."""

    root: Path
    name: str
    batch: int
    time: float

    @property
    def place(self) -> Path:
        """Where the run is now."""
        return self.root / ARCHIVE / self.name

    @property
    def origin(self) -> Path:
        """Where it was, and goes back to."""
        return self.root / self.name

    def count_bytes(self) -> int:
        """Return the bytes of its files."""
        return sum(file.lstat().st_size for file in self.place.rglob("*") if not file.is_dir())


def list_archive(root: Path) -> list[Archived]:
    """Return the runs in the archive of `root`, oldest move first.

    A run that the log does not have, since a command was killed or the log is damaged, is of the batch 0.
    """
    noted: dict[str, tuple[int, float]] = {}
    file = root / ARCHIVE / LOG
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            plain = json.loads(line)
            noted[str(plain["run"])] = int(plain["batch"]), float(plain["time"])
        except (ValueError, KeyError, TypeError):
            continue  # cut short by a killed command; the folder itself is listed below
    found: list[Archived] = []
    for manifest in (root / ARCHIVE).glob(f"*/*/{MANIFEST}"):
        name = f"{manifest.parents[1].name}/{manifest.parent.name}"
        batch, moved = noted.get(name, (0, manifest.stat().st_mtime))
        found.append(Archived(root, name, batch, moved))
    return sorted(found, key=lambda item: (item.batch, item.time, item.name))


def archive_runs(runs: Sequence[Path]) -> list[Archived]:
    """Move runs of one folder to its archive: all, or none where one of them cannot be moved.

    Raises:
        ConfigError: runs of different folders, a run that is running, or one of whose name is in the archive.
    """
    roots = list(dict.fromkeys(run.parents[1] for run in runs))
    if len(roots) != 1:
        raise ConfigError(f"rm: runs of {roots[0]} and {roots[1]}; call it once for each folder")
    root = roots[0]
    known = list_archive(root)
    batch = max((item.batch for item in known), default=0) + 1
    moved = [Archived(root, f"{run.parent.name}/{run.name}", batch, time.time()) for run in dict.fromkeys(runs)]
    for item in moved:
        if item.place.exists():
            raise ConfigError(f"rm: {item.place} is in the archive already; rename the run, or --purge that one")
    with ExitStack() as held:
        for item in moved:
            held.enter_context(lock(item.origin))
        (root / ARCHIVE).mkdir(exist_ok=True)
        with open(root / ARCHIVE / LOG, "a", encoding="utf-8") as log:
            for item in moved:
                log.write(json.dumps({"run": item.name, "batch": item.batch, "time": item.time}) + "\n")
            log.flush()
            os.fsync(log.fileno())
        for item in moved:
            item.place.parent.mkdir(parents=True, exist_ok=True)
            os.rename(item.origin, item.place)
    return moved


def restore_runs(items: Sequence[Archived]) -> None:
    """Move runs back to where they were.

    Raises:
        ConfigError: something is there by now.
    """
    for item in items:
        if item.origin.exists():
            raise ConfigError(f"rm: {item.origin}: cannot come back from the archive, it exists; move it away first")
    for item in items:
        item.origin.parent.mkdir(parents=True, exist_ok=True)
        os.rename(item.place, item.origin)
        _remove_if_empty(item.place.parent)


def purge_runs(items: Sequence[Archived]) -> int:
    """Delete runs of the archive for good and return their bytes."""
    total = 0
    for item in items:
        total += item.count_bytes()
        shutil.rmtree(item.place)
        _remove_if_empty(item.place.parent)
    return total


def select_archived(root: Path, names: Sequence[str]) -> list[Archived]:
    """Return the runs of the archive that are named: NAME/RUN, RUN, or a path that ends so.

    Raises:
        ConfigError: no such run in the archive, with the nearest one.
    """
    known = {item.name: item for item in list_archive(root)}
    found: list[Archived] = []
    for text in names:
        end = "/".join(Path(text).parts[-2:])
        matches = [item for name, item in known.items() if name == end or name.endswith(f"/{Path(text).name}")]
        if not matches:
            hint = nearest(end, known) or f"; in the archive: {', '.join(list(known)[:5]) or 'no run'}"
            raise ConfigError(f"rm: {text}: not in the archive of {root}{hint}")
        found += matches
    return list(dict.fromkeys(found))


def find_dependents(runs: Iterable[Path]) -> dict[str, list[str]]:
    """Return by run the other runs of its folder whose command line names it: as a teacher, or as weights."""
    chosen = {run.name: f"{run.parent.name}/{run.name}" for run in runs}
    roots = {run.parents[1] for run in runs}
    found: dict[str, list[str]] = {}
    for other in [run for root in roots for run in list_runs(root) if run.name not in chosen]:
        file = other / OVERRIDES
        words = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        for name, shown in chosen.items():
            if name in words:
                found.setdefault(shown, []).append(f"{other.parent.name}/{other.name}")
    return found


def _remove_if_empty(folder: Path) -> None:
    if not any(folder.iterdir()):
        folder.rmdir()
