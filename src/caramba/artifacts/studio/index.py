"""The records and curves of runs, kept in the index of a folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from caramba.artifacts.studio.curve import COARSE, FINE, Curve
from caramba.artifacts.studio.record import RunRecord, read_record
from caramba.runs.index import open_index, stamp


@dataclass(frozen=True)
class IndexedRun:
    """A run with its record; `curves` are (phase, key, points) in the order of `packed`."""

    run: Path
    record: RunRecord
    curves: list[tuple[str, str, int]]
    packed: bytes


def index_runs(
    folder: Path, runs: Iterable[Path], *, most_fine: int, report: Callable[[int, int], None] | None = None
) -> list[IndexedRun]:
    """Return the records of runs; those whose files changed since the last call are read again.

    Args:
        folder: the folder that the index is of.
        most_fine: curves of all runs together that have FINE points; of more curves each has COARSE points.
        report: called with how many of all runs have been read, where any has to be.
    """
    listed = [(run, stamp(run)) for run in runs]
    with open_index(folder) as database:
        known = dict(database.execute("SELECT path, stamp FROM runs"))
        stale = [item for item in listed if known.get(os.fsencode(item[0])) != item[1]]
        for number, (run, now) in enumerate(stale):
            database.execute("REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?)", _row(run, now))
            if report is not None:
                report(number + 1, len(stale))
            if number % 50 == 49:
                database.commit()
        gone = known.keys() - {os.fsencode(run) for run, _ in listed}
        database.executemany("DELETE FROM runs WHERE path = ?", [(path,) for path in gone])
        database.commit()
        plain = {path: json.loads(text) for path, text in database.execute("SELECT path, curves FROM runs")}
        is_fine = sum(map(len, plain.values())) <= most_fine
        query = f"SELECT path, record, {'fine' if is_fine else 'coarse'} FROM runs"
        rows = {path: (record, packed) for path, record, packed in database.execute(query)}
    found: list[IndexedRun] = []
    for run, _ in listed:
        path = os.fsencode(run)
        curves = [(phase, key, fine if is_fine else coarse) for phase, key, fine, coarse in plain[path]]
        found.append(IndexedRun(run, RunRecord.from_json(rows[path][0]), curves, rows[path][1]))
    return found


def _row(run: Path, now: str) -> tuple[object, ...]:
    record, curves = read_record(run)
    fine, coarse = ([curve.pack(most) for curve in curves] for most in (FINE, COARSE))
    listed = [_entry(*item) for item in zip(curves, fine, coarse, strict=True)]
    return os.fsencode(run), now, record.to_json(), json.dumps(listed), b"".join(fine), b"".join(coarse)


def _entry(curve: Curve, fine: bytes, coarse: bytes) -> tuple[str, str, int, int]:
    return curve.phase, curve.key, len(fine) // 12, len(coarse) // 12
