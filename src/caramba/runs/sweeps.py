"""Sweep directories: `runs/<name>/sweeps/<UTC time>-<hash 8>/` with an index of points, each an ordinary run."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caramba.errors import CarambaError, ConfigError, nearest
from caramba.runs.files import drop_mark, mark_starting, write_json, write_whole
from caramba.runs.manifest import canonical_json, read_manifest
from caramba.runs.minting import MINTED, reserve_folder
from caramba.runs.state import FAILED, FINISHED, INTERRUPTED, RUNNING, WAITING, awaits_job, run_state

if TYPE_CHECKING:
    from caramba.config.manifest import Manifest

INDEX, FOLDER, POINTS, LOGS = "index.json", "sweeps", "points", "logs"
SCHEMA = 1


@dataclass
class Point:
    """One point of a sweep: its overrides, and its runs from the first attempt to the last, relative to the sweep."""

    number: int
    overrides: list[str]
    experiment: str
    state: str = WAITING
    runs: list[str] = field(default_factory=list)
    exit_status: int | None = None
    error: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return " ".join(self.overrides) or f"point {self.number}"


@dataclass
class Sweep:
    """A sweep: what was asked for, and its points. `experiment` is the same for the same points."""

    folder: Path
    experiment: str
    overrides: list[str]
    points: list[Point]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The folder `runs` that the sweep and its runs are in."""
        return self.folder.parents[2]

    def save(self) -> None:
        """Write the index, whole."""
        plain = {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "overrides": self.overrides,
            "settings": self.settings,
            "points": [asdict(point) for point in self.points],
        }
        write_json(self.folder / INDEX, plain)

    def manifest_file(self, point: Point) -> Path:
        return self.folder / POINTS / f"{point.number:04d}.json"

    def log_file(self, point: Point) -> Path:
        return self.folder / LOGS / f"{point.number:04d}.log"

    def manifest(self, point: Point) -> Manifest:
        """Read the manifest that a point was frozen to."""
        return read_manifest(self.manifest_file(point))

    def run_of(self, point: Point) -> Path | None:
        """Return the newest run of a point that is still there."""
        found = (Path(os.path.normpath(self.folder / run)) for run in reversed(point.runs))
        return next((run for run in found if run.is_dir()), None)

    def link(self, point: Point, run: Path) -> None:
        """Make `run` the newest run of a point."""
        relative = os.path.relpath(run, self.folder)
        if relative not in point.runs:
            point.runs.append(relative)

    def refresh(self, known: Mapping[Path, str] | None = None) -> None:
        """Bring the states up to what the run directories say, which is what a killed front end left unsaid.

        `known` has the states of runs that were read already.
        """
        for point in self.points:
            run = self.run_of(point)
            if run is None:
                if point.state in (RUNNING, FINISHED, INTERRUPTED):
                    point.state = WAITING
                continue
            found = (known or {}).get(run) or run_state(run).state
            if found in (FINISHED, RUNNING, FAILED) or awaits_job(run):
                point.state = found
            elif point.state in (RUNNING, FINISHED, WAITING):
                is_queued = point.state == WAITING == found
                point.state = WAITING if is_queued else INTERRUPTED

    def counts(self) -> dict[str, int]:
        """Return how many points are in each state, those that occur."""
        states = [point.state for point in self.points]
        order = (FINISHED, RUNNING, FAILED, INTERRUPTED, WAITING)
        return {state: states.count(state) for state in order if state in states}


def hash_experiments(experiments: Iterable[str]) -> str:
    """Return the one hash of a sequence of experiments."""
    return hashlib.sha256("\n".join(experiments).encode()).hexdigest()


def create_sweep(
    name: str,
    overrides: Sequence[str],
    experiment: str,
    points: Iterable[tuple[Point, Manifest | str]] = (),
    settings: dict[str, Any] | None = None,
    root: Path = Path("runs"),
) -> Sweep:
    """Make a sweep directory and write the manifests of its points.

    The index is written last: a sweep with an index is complete.

    Raises:
        CarambaError: the folder cannot be written.
    """
    _clear_leftovers(root / name / FOLDER)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    parent = (root / name / FOLDER).absolute()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = reserve_folder(parent, f"{stamp}-{experiment[:8]}", "sweeps")
        sweep = Sweep(folder, experiment, list(overrides), [], dict(settings or {}))
        for point, manifest in points:
            add_point(sweep, point, manifest)
        sweep.save()
    except OSError as error:
        raise CarambaError(
            f"{parent}: cannot make a sweep directory: {error.strerror}; free space, or start from another folder"
        ) from None
    return sweep


def add_point(sweep: Sweep, point: Point, manifest: Manifest | str) -> None:
    """Write the manifest of a further point and list it; the index is not saved yet."""
    text = manifest if isinstance(manifest, str) else canonical_json(manifest)
    write_whole(sweep.manifest_file(point), text)
    sweep.points.append(point)


def _clear_leftovers(parent: Path) -> None:
    """Remove sweeps of a killed start without an index: they have no run yet."""
    folders = parent.iterdir() if parent.is_dir() else ()
    for folder in [item for item in folders if MINTED.fullmatch(item.name)]:
        is_untouched = all(item.name == POINTS or item.name.endswith(".part") for item in folder.iterdir())
        if is_untouched and mark_starting(folder) and not (folder / INDEX).exists():
            shutil.rmtree(folder)
            drop_mark(folder)


def read_sweep(folder: Path) -> Sweep:
    """Read a sweep directory.

    Raises:
        ConfigError: no index there, or one that is not caramba's.
    """
    file = folder.absolute() / INDEX
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        if plain["schema"] != SCHEMA:
            raise ConfigError(f"{file}: schema {plain['schema']}, expected {SCHEMA}; read it with its own caramba")
        points = [Point(**point) for point in plain["points"]]
        return Sweep(file.parent, plain["experiment"], plain["overrides"], points, plain["settings"])
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot read the index of a sweep: {error.strerror}; give a sweep directory"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: not the index of a sweep ({error}); the file was changed") from None


def find_sweep(name: str, experiment: str, root: Path = Path("runs")) -> Sweep | None:
    """Return the newest sweep of exactly these points, or None."""
    for folder in reversed(list_sweeps(root / name)):
        sweep = read_sweep(folder)
        if sweep.experiment == experiment:
            return sweep
    return None


def list_sweeps(folder: Path) -> list[Path]:
    """Return the sweeps of a folder, oldest first: of `runs`, of `runs/NAME`, or of the sweep that it is."""
    if (folder / INDEX).is_file():
        return [folder.absolute()]
    found = [*folder.glob(f"{FOLDER}/*/{INDEX}"), *folder.glob(f"*/{FOLDER}/*/{INDEX}")]
    return [file.parent.absolute() for file in sorted(found, key=lambda file: file.parent.name)]


def is_sweep(folder: Path) -> bool:
    """Whether a folder is a sweep directory."""
    return (folder / INDEX).is_file() and (folder / POINTS).is_dir()


def resolve_sweep(text: str, root: Path = Path("runs")) -> Path:
    """Return the sweep directory that `text` means: a sweep, `runs/NAME` or NAME (its newest sweep), or `latest`.

    Raises:
        ConfigError: no sweep of that name, with the nearest one.
    """
    candidates = [root] if text == "latest" else [Path(text).expanduser(), root / text]
    for candidate in candidates:
        found = list_sweeps(candidate)
        if found:
            return found[-1]
    known = [f"{folder.parents[1].name}/{FOLDER}/{folder.name}" for folder in list_sweeps(root)]
    hint = nearest(text.removeprefix(f"{root}/").rstrip("/"), known)
    raise ConfigError(f"{text}: no sweep there (a sweep is a directory with {INDEX}){hint or '; start one with -m'}")
