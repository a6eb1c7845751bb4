"""The index of runs in SQLite: a cache of what was read of their files, made from the folders, never the truth."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from caramba.runs.annotations import ANNOTATIONS
from caramba.runs.events import EVENTS
from caramba.runs.files import LOCK, home, is_locked
from caramba.runs.manifest import MANIFEST, OVERRIDES, SOURCES
from caramba.runs.state import FAILED, FINISHED, JOB, RESULT, RunState, run_state

VERSION = 2
FEWEST = 50
"""Fewer runs are read from their files: it takes less than the index."""
_TABLES = (
    "CREATE TABLE IF NOT EXISTS runs "
    "(path BLOB PRIMARY KEY, stamp TEXT, record TEXT, curves TEXT, fine BLOB, coarse BLOB)",
    "CREATE TABLE IF NOT EXISTS texts "
    "(kind TEXT, path BLOB, stamp TEXT, content TEXT, PRIMARY KEY (kind, path)) WITHOUT ROWID",
)
_FILES = (
    *(EVENTS, RESULT, MANIFEST, OVERRIDES, SOURCES, JOB, ANNOTATIONS),
    *("env.json", "artifacts/report.json"),
)
_GROUP_FILES = (EVENTS, "artifacts/report.json")


def stamp(run: Path) -> str:
    """Return what changes when a file that the index is made of does: sizes and times."""
    folders = [(str(run), _FILES)]
    groups = os.path.join(run, "groups")
    if os.path.isdir(groups):
        folders += [(os.path.join(groups, name), _GROUP_FILES) for name in sorted(os.listdir(groups))]
    return " ".join(_stamp(f"{folder}/{name}") for folder, names in folders for name in names)


def _stamp(path: str) -> str:
    try:
        found = os.stat(path)
    except OSError:
        return "-"
    return f"{found.st_mtime_ns}:{found.st_size}"


def read_states(folder: Path, runs: Sequence[Path]) -> list[RunState]:
    """Return the states of runs; those of runs that have ended come from the index of `folder`."""

    def read(run: Path) -> tuple[str, bool]:
        state = run_state(run)
        return json.dumps(asdict(state) | {"run": ""}), state.state in (FINISHED, FAILED)

    texts = read_indexed(folder, "state", runs, read)
    return [RunState(**(json.loads(text) | {"run": run})) for run, text in zip(runs, texts, strict=True)]


def read_indexed(folder: Path, kind: str, runs: Sequence[Path], read: Callable[[Path], tuple[str, bool]]) -> list[str]:
    """Return a text for each run: that of the index, or what `read` returns where the run's files have changed.

    Args:
        kind: what the texts are of; each kind has its own.
        read: returns the text of a run, and whether it stays true until a file of the run changes.
    """
    if len(runs) < FEWEST:
        return [read(run)[0] for run in runs]
    listed = [(run, os.fsencode(run), stamp(run)) for run in runs]
    with open_index(folder) as database:
        query = "SELECT path, stamp, content FROM texts WHERE kind = ?"
        known = {path: (now, text) for path, now, text in database.execute(query, (kind,))}
        found: list[str] = []
        changed: list[tuple[str, bytes, str, str]] = []
        for run, path, now in listed:
            before = known.get(path)
            if before is not None and before[0] == now and not _may_be_locked(run):
                found.append(before[1])
                continue
            text, is_kept = read(run)
            found.append(text)
            if is_kept:
                changed.append((kind, path, now, text))
        database.executemany("REPLACE INTO texts VALUES (?, ?, ?, ?)", changed)
        gone = known.keys() - {path for _, path, _ in listed}
        database.executemany("DELETE FROM texts WHERE kind = ? AND path = ?", [(kind, path) for path in gone])
        database.commit()
    return found


def _may_be_locked(run: Path) -> bool:
    return os.path.exists(f"{run}/{LOCK}") and is_locked(run)


def index_file(folder: Path) -> Path:
    """Return the file of a folder's index: in the folder of caches, which can be deleted at any time."""
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    return home() / "indexes" / f"{digest}.sqlite"


@contextmanager
def open_index(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the index: empty where it was damaged or of another version, in memory where no file can be kept."""
    file = index_file(folder)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        database = _prepared(file)
    except (sqlite3.OperationalError, OSError):  # a read-only folder, or a writer that does not end
        database = _prepared(":memory:")
    except sqlite3.DatabaseError:
        file.unlink()
        database = _prepared(file)
    with closing(database):
        yield database


def _prepared(file: Path | str) -> sqlite3.Connection:
    database = sqlite3.connect(file, timeout=10)
    try:
        if database.execute("PRAGMA user_version").fetchone()[0] != VERSION:
            for name in ("runs", "texts"):
                database.execute(f"DROP TABLE IF EXISTS {name}")
            database.execute(f"PRAGMA user_version = {VERSION}")
        for table in _TABLES:
            database.execute(table)
        database.execute("SELECT path, stamp, record, curves, fine, coarse FROM runs LIMIT 1").fetchall()
        database.execute("SELECT kind, path, stamp, content FROM texts LIMIT 1").fetchall()
    except BaseException:
        database.close()
        raise
    return database
