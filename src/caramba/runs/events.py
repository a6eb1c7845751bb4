"""events.jsonl: what happened in a run, one JSON object a line, appended; metrics.csv is made from it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba.runs.files import csv_text, write_whole

EVENTS = "events.jsonl"
METRICS = "metrics.csv"
RUN_STARTED, PHASE_STARTED, PHASE_FINISHED = "run_started", "phase_started", "phase_finished"
MEMORY_SLOTS = "memory_slots"
"""What queries read of each memory slot, after a validation."""
REPEATED = ("metrics", "step_skipped", MEMORY_SLOTS)
"""Events of a step, which a run that resumes from an earlier state records again."""


def append_event(run_dir: Path, kind: str, **fields: Any) -> None:
    """Append one event. NaN and infinities, which JSON lacks, are written as strings so that they are not lost."""
    record = {
        "time": round(time.time(), 3),
        "event": kind,
        **{key: _plain(value) for key, value in fields.items()},
    }
    line = json.dumps(record, ensure_ascii=False) + "\n"
    with open(run_dir / EVENTS, "ab+") as file:
        if file.seek(0, 2):
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # A killed writer cut its line short, and this one would be lost with it.
                line = f"\n{line}"
        file.write(line.encode())


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a run. A last line cut short by a killed writer is skipped; any other bad line raises."""
    path = run_dir / EVENTS
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            if number + 1 < len(lines) and not lines[number + 1].startswith("{"):
                raise


def read_finished_phases(run_dir: Path) -> list[str]:
    """Return the phases that events.jsonl has as finished. Other events, which may be many, are not parsed."""
    mark = f'"event": "{PHASE_FINISHED}"'
    try:
        with open(run_dir / EVENTS, encoding="utf-8", errors="replace") as file:
            return [str(json.loads(line)["phase"]) for line in file if mark in line and line.endswith("}\n")]
    except FileNotFoundError:
        return []


def metric_rows(run_dir: Path) -> Iterator[tuple[str, int, dict[str, float]]]:
    """Yield (phase, step, values) of every row of metrics, in order; NaN and infinities are numbers again."""
    for event in read_events(run_dir):
        if event["event"] == "metrics":
            yield event["phase"], event["step"], {key: float(value) for key, value in event["values"].items()}


def start_phase(run_dir: Path, phase: str, step: int) -> float:
    """Record that this process trains a phase from `step` on; return the seconds that earlier processes trained it.

    A process that was killed recorded no end, so its time ends with the last event that it recorded. Called before the
    rows that are repeated are dropped.
    """
    earlier, began, last = 0.0, None, 0.0
    for event in read_events(run_dir):
        is_start = event["event"] == PHASE_STARTED
        if began is not None and (is_start or event["event"] == RUN_STARTED):
            earlier, began = earlier + max(last - began, 0.0), None
        if is_start and event["phase"] == phase:
            earlier, began = event["earlier_s"], event["time"]
        last = event["time"]
    if began is not None:  # An earlier attempt of this process, which ran out of memory.
        earlier += max(last - began, 0.0)
    append_event(run_dir, PHASE_STARTED, phase=phase, step=step, earlier_s=round(earlier, 3))
    return earlier


def drop_metrics_after(run_dir: Path, phase: str, step: int) -> None:
    """Remove the rows and skipped steps of a phase after `step` from the events.

    The phase resumes there and records them again.

    A last line that a killed writer cut short goes too, or the next event would be written behind it and lost.
    """
    events = list(read_events(run_dir))
    kept = [
        event
        for event in events
        if not (event["event"] in REPEATED and event.get("phase") == phase and event["step"] > step)
    ]
    if not (run_dir / EVENTS).is_file():
        return
    is_torn = not (run_dir / EVENTS).read_bytes().endswith(b"\n")
    if is_torn or len(kept) < len(events):
        lines = [json.dumps(event, ensure_ascii=False) + "\n" for event in kept]
        write_whole(run_dir / EVENTS, "".join(lines))


def write_metrics(run_dir: Path) -> None:
    """Write metrics.csv: a row per phase and step in order, a column per metric."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    columns: dict[str, None] = {}
    for event in read_events(run_dir):
        if event["event"] == "metrics":
            row = rows.setdefault((event["phase"], event["step"]), {})
            row |= event["values"]
            columns |= dict.fromkeys(event["values"])
    lines = ([*key, *map(row.get, columns)] for key, row in rows.items())
    write_whole(run_dir / METRICS, csv_text([["phase", "step", *columns], *lines]))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
