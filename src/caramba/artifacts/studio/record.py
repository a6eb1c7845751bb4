"""What the studio shows of one run, read from its files; what cannot be read is listed, and the rest is kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from caramba.artifacts.across_runs.gather import UNREADABLE, read_labels, read_metrics, split_words
from caramba.artifacts.across_runs.leaves import MOST_TEXT, flatten
from caramba.artifacts.metrics import is_standard_error
from caramba.runs.events import EVENTS, PHASE_STARTED
from caramba.runs.index import open_index, stamp
from caramba.runs.manifest import MANIFEST, OVERRIDES, SOURCES, plugin_sources, read_overrides
from caramba.runs.state import FAILED, RunState, run_state

T = TypeVar("T")
_LAST = {"loss": "loss", "running_loss": "loss", "val_loss": "held_out"}


@dataclass
class RunRecord:
    """A run as the page has it.

    `metrics` are (value, unit, dispersion, whether that is a standard error, n) by key; `config` has a line
    `KEY<tab>JSON` for each leaf of the manifest; `phases` are (name, planned steps, tokens of a step,
    whether it trains a control); `last` are (phase, step, value) of `loss` and `held_out`.
    """

    name: str
    words: dict[str, str] = field(default_factory=lambda: {})
    metrics: dict[str, list[Any]] = field(default_factory=lambda: {})
    config: str = ""
    phases: list[list[Any]] = field(default_factory=lambda: [])
    last: dict[str, list[Any]] = field(default_factory=lambda: {})
    manifest_sha256: str = ""
    git: str = ""
    proxy: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=lambda: [])
    state: dict[str, Any] = field(default_factory=lambda: {})

    def to_json(self) -> str:
        # ASCII, so that names that are not UTF-8 pass.
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunRecord:
        return cls(**json.loads(text))


def read_state(run: Path) -> RunState:
    """Return the state of a run; one whose files cannot be read has failed, with the reason."""
    try:
        return run_state(run)
    except UNREADABLE as error:
        updated = (run / MANIFEST).stat().st_mtime
        return RunState(run, FAILED, None, 0, None, updated, updated, f"cannot be read: {error}")


def read_record(run: Path) -> tuple[RunRecord, list[Curve]]:
    """Read everything that the page shows of a run, and its curves. Its state is that of now."""
    record = RunRecord(f"{run.parent.name}/{run.name}")
    record.state = asdict(read_state(run)) | {"run": ""}

    def read(what: str, reader: Callable[[], T], default: T) -> T:
        try:
            return reader()
        except UNREADABLE as error:
            record.problems.append(f"{what}: cannot be read: {type(error).__name__}: {error}"[:MOST_TEXT])
            return default

    manifest: dict[str, Any] = read(MANIFEST, lambda: _read_dict(run / MANIFEST), {})
    record.config = read(MANIFEST, lambda: "\n".join(flatten(manifest)) if manifest else "", "")
    record.manifest_sha256 = read(MANIFEST, lambda: hashlib.sha256((run / MANIFEST).read_bytes()).hexdigest(), "")
    words = read(OVERRIDES, lambda: split_words(read_overrides(run)), {})
    record.words = words | read(SOURCES, lambda: plugin_sources(run), {})
    measured = read("artifacts/report.json", lambda: read_metrics(run), {})
    record.metrics = {
        key: [
            item.value,
            item.unit,
            item.std if item.standard_error is None else item.standard_error,
            item.standard_error is not None or is_standard_error(key),
            item.n,
        ]
        for key, item in measured.items()
    }
    record.proxy = read("artifacts/report.json", lambda: read_labels(run).get("proxy", ""), "")
    record.git = read("env.json", lambda: _git(run), "")
    curves: list[Curve] = []
    for folder in (run, *sorted(run.glob("groups/*"))):
        prefix = "" if folder == run else f"{folder.name}/"
        found = read(f"{prefix}{EVENTS}", lambda folder=folder: read_phases(folder), [])
        for phase in found:
            plan = read(MANIFEST, lambda phase=phase: plan_of(manifest, phase.name), PhasePlan())
            record.phases.append([f"{prefix}{phase.name}", plan.steps, plan.tokens, plan.is_control])
            record.seconds += phase.seconds
            named = [curve.rename_phase(f"{prefix}{phase.name}") for curve in phase.curves]
            for curve in named:
                if (kind := _LAST.get(curve.key)) is not None and not plan.is_control:
                    record.last[kind] = [curve.phase, curve.steps[-1], curve.values[-1]]
            curves += named
            if phase.n_not_finite:
                record.problems.append(f"{prefix}{phase.name}: {phase.n_not_finite:,} values are not finite")
    record.problems = list(dict.fromkeys(record.problems))
    return record, curves


@dataclass(frozen=True)
class PhasePlan:
    """What a manifest plans of a phase: steps, tokens of a step, and whether it trains a control."""

    steps: int | None = None
    tokens: int | None = None
    is_control: bool = False


def plan_of(manifest: dict[str, Any], phase: str) -> PhasePlan:
    """Return the plan of a phase from a plain manifest, an empty one where it has none."""
    groups = cast("list[dict[str, Any]]", manifest.get("groups") or [])
    for item in [item for group in groups for item in cast("list[dict[str, Any]]", group.get("runs") or [])]:
        train = cast("dict[str, Any]", item.get("train") or {})
        if item.get("id") == phase and train:
            sizes = (train["batch_size"], train["block_size"], train.get("gradient_accumulation_steps") or 1)
            is_known = all(isinstance(size, int) for size in sizes)
            tokens = sizes[0] * sizes[1] * sizes[2] if is_known else None
            return PhasePlan(train.get("steps"), tokens, bool(train.get("control")))
    return PhasePlan()


def _git(run: Path) -> str:
    plain = _read_dict(run / "env.json") if (run / "env.json").is_file() else {}
    commit = plain.get("git_commit") or plain.get("commit")
    if not commit:
        return ""
    is_clean = plain.get("git_is_clean")
    return f"{commit}" + ("" if is_clean is None else ", clean" if is_clean else ", with changes")


def _read_dict(file: Path) -> dict[str, Any]:
    plain = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(plain, dict):
        raise ValueError(f"holds {type(plain).__name__}, expected an object")
    return cast("dict[str, Any]", plain)


FINE, COARSE = 600, 100
"""Most points of a curve on a page with few curves, and on one with many."""
MOST_CURVES = 12
# The order in which curves are kept where a phase recorded more.
_FIRST = ("loss", "running_loss", "val_loss", "lr", "tokens_per_s", "grad_norm")
_NOT_FINITE = ("nan", "inf", "-inf")


@dataclass(frozen=True)
class Curve:
    """Values of one metric in one phase: steps, seconds since the phase began, values."""

    phase: str
    key: str
    steps: Sequence[float]
    seconds: Sequence[float]
    values: Sequence[float]

    def rename_phase(self, phase: str) -> Curve:
        return replace(self, phase=phase)

    def pack(self, most: int) -> bytes:
        """Return at most `most` points as little-endian float32: all steps, all seconds, all values."""
        kept = thin(self.values, most)
        columns = [[column[index] for index in kept] for column in (self.steps, self.seconds, self.values)]
        return b"".join(struct.pack(f"<{len(kept)}f", *column) for column in columns)


@dataclass
class PhaseEvents:
    """What a phase recorded; `seconds` is its training time over all sittings."""

    name: str
    began: float = 0.0
    earlier: float = 0.0
    seconds: float = 0.0
    n_not_finite: int = 0
    points: dict[str, dict[int, tuple[float, float]]] = field(default_factory=lambda: {})

    @property
    def curves(self) -> list[Curve]:
        order = {key: index for index, key in enumerate(_FIRST)}
        keys = sorted(self.points, key=lambda key: order.get(key, len(order)))
        curves: list[Curve] = []
        for key in keys[:MOST_CURVES]:
            listed = sorted(self.points[key].items())
            seconds, values = [item[1][0] for item in listed], [item[1][1] for item in listed]
            curves.append(Curve(self.name, key, [step for step, _ in listed], seconds, values))
        return curves


def thin(values: Sequence[float], most: int) -> list[int]:
    """Return the indices of at most `most` points, the first and the last among them, and every bucket's extremes."""
    n = len(values)
    if n <= most:
        return list(range(n))
    n_buckets = max(1, (most - 2) // 2)
    kept = {0, n - 1}
    for bucket in range(n_buckets):
        indices = range(bucket * n // n_buckets, (bucket + 1) * n // n_buckets)
        part = values[indices.start : indices.stop]
        kept.add(indices.start + part.index(min(part)))
        kept.add(indices.start + part.index(max(part)))
    return sorted(kept)


def read_phases(folder: Path) -> list[PhaseEvents]:
    """Return the phases of a run's events in order. A step that was repeated counts once.

    A line that a killed writer cut short is skipped; any other that is no JSON raises ValueError.
    """
    path = folder / EVENTS
    if not path.is_file():
        return []
    phases: dict[str, PhaseEvents] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        # Other events are many in some runs, and are not needed.
        if b'"metrics"' not in line and PHASE_STARTED.encode() not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            if number + 1 >= len(lines) or lines[number + 1][:1] in (b"{", b""):
                continue
            raise
        _add(phases, event)
    return list(phases.values())


def _add(phases: dict[str, PhaseEvents], event: dict[str, Any]) -> None:
    kind = event.get("event")
    if kind not in ("metrics", PHASE_STARTED):
        return
    name, time = event["phase"], event["time"]
    phase = phases.get(name)
    if phase is None:
        phase = phases[name] = PhaseEvents(name, began=time)
    if kind == PHASE_STARTED:
        phase.began, phase.earlier = time, event.get("earlier_s", 0.0)
        return
    step = event["step"]
    phase.seconds = seconds = phase.earlier + max(0.0, time - phase.began)
    for key, value in event["values"].items():
        if "/" in key:  # one for each block or layer
            continue
        if not isinstance(value, float | int):
            if value not in _NOT_FINITE:
                raise ValueError(f"{name} step {step}: {key} is {value!r}, expected a number")
            phase.n_not_finite += 1
        elif math.isfinite(value):
            phase.points.setdefault(key, {})[step] = (seconds, value)


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
