"""The facts at the head of a report: when, how long, by which command, and of which model, data, device and source."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from caramba.artifacts.key import parse_key
from caramba.artifacts.metrics import STUDENT, TEACHER, headline
from caramba.artifacts.summary import ratio_key
from caramba.artifacts.tables import Cell, number
from caramba.result import Metric, RunResult
from caramba.runs.events import RUN_STARTED, read_events
from caramba.runs.manifest import OVERRIDES, read_overrides

_WORK = ("phase_", "metrics")


@dataclass(frozen=True)
class Fact:
    """A name and a text of the header."""

    name: str
    text: str


def read_facts(result: RunResult, run_dir: Path) -> list[Fact]:
    """Return the facts of a report's head; those of missing or damaged files are omitted."""
    return facts_of(run_dir, result.labels, result.environment, result.git_commit)


def facts_of(run_dir: Path, labels: dict[str, str], environment: dict[str, Any], git_commit: str | None) -> list[Fact]:
    """Return the facts that the files of a run hold, and that its report holds besides."""
    root = run_dir.parents[1] if run_dir.parent.name == "groups" else run_dir
    manifest = _read_json(root / "manifest.json")
    events = [event for event in read_events(run_dir) if isinstance(event.get("time"), int | float)]
    listed = [
        ("Date", _date(events)),
        ("Duration", _duration(events)),
        ("Command", _command(root)),
        ("Model", _model(manifest)),
        ("Data", _data(labels)),
        ("Device", _device(environment)),
        ("Git", _git(git_commit, environment)),
    ]
    return [Fact(name, text) for name, text in listed if text]


def sum_sittings(events: Iterable[dict[str, Any]]) -> tuple[float, int]:
    """Return the seconds of all sittings, and how many trained.

    A sitting lasts from its start to its last event of a phase.

    A sitting that writes artifacts alone does not count, so that equal results give equal pages.
    """
    seconds, n_sittings, last, has_work = 0.0, 0, None, False
    for event in events:
        name, time = str(event.get("event")), float(event["time"])
        if last is None or name == RUN_STARTED:
            last, has_work = time, False
        elif name.startswith(_WORK):
            n_sittings += not has_work
            seconds += max(0.0, time - last)
            last, has_work = time, True
    return seconds, n_sittings


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600:,} h {whole % 3600 // 60} min"


def _date(events: list[dict[str, Any]]) -> str:
    if not events:
        return ""
    return datetime.fromtimestamp(events[0]["time"], UTC).strftime("%Y-%m-%d %H:%M UTC")


def _duration(events: list[dict[str, Any]]) -> str:
    seconds, n_sittings = sum_sittings(events)
    if not n_sittings:
        return ""
    return duration_text(seconds) + (f", sum of {n_sittings} sittings" if n_sittings > 1 else "") + " (training)"


def _command(root: Path) -> str:
    try:
        words = read_overrides(root)
    except (OSError, UnicodeDecodeError):
        return ""
    if not (root / OVERRIDES).is_file():
        return ""
    return " ".join(["caramba launch", *map(shlex.quote, words)])


def _model(manifest: dict[str, Any]) -> str:
    model = _dict(manifest.get("model"))
    embedder, surgery, teacher = (_dict(model.get(name)) for name in ("embedder", "surgery", "teacher"))
    parts = [str(model.get("name") or "")]
    if embedder.get("d_model"):
        parts.append(f"width {embedder['d_model']}")
    if isinstance(embedder.get("vocab_size"), int):
        parts.append(f"{embedder['vocab_size']:,} tokens")
    source = teacher.get("checkpoint") or _dict(teacher.get("manifest")).get("name")
    if surgery.get("method") and source:
        parts.append(f"{surgery['method']} surgery of {source}")
    return ", ".join(part for part in parts if part)


def _data(labels: dict[str, str]) -> str:
    parts = [labels.get("data", ""), labels.get("tokenizer", "")]
    parts += [f"fingerprint {labels['data_fingerprint']}"] if "data_fingerprint" in labels else []
    return ", ".join(part for part in parts if part)


def _device(environment: dict[str, Any]) -> str:
    gpus = cast("list[Any]", environment.get("gpus") or [])
    if gpus:
        names = [str(_dict(gpu).get("name", gpu)) for gpu in gpus]
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    cpu, count = environment.get("cpu"), environment.get("cpu_count")
    return f"{cpu}, {count} cores" if cpu and count else str(cpu or "")


def _git(git_commit: str | None, environment: dict[str, Any]) -> str:
    if git_commit is None:
        return "not in a repository"
    is_clean = environment.get("git_is_clean")
    return git_commit[:12] + ("" if is_clean is None else ", clean" if is_clean else ", with changes")


def _dict(value: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return _dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError):
        return {}


Z_95 = 1.959964


def conclude(result: RunResult, metrics: dict[str, Metric]) -> list[Cell]:
    """Return the sentence as pieces of text; those with a key are numbers of the report.

    With a teacher it is about the ratio of perplexities and of cache bytes, else about the model alone; of a run
    without benchmarks about its last loss.
    """
    perplexity = headline(metrics, "perplexity", "perplexity")
    student, teacher = perplexity.get(STUDENT), perplexity.get(TEACHER)
    if student is not None and teacher is not None:
        return _against_teacher(student, metrics)
    alone = student or (next(iter(perplexity.values())) if perplexity else None)
    if alone is not None:
        name = "teacher" if parse_key(alone.key).model == TEACHER else "model"
        return [
            Cell(f"The {name} has a held-out perplexity of "),
            _value(alone),
            *_interval(alone),
            Cell("."),
        ]
    trained = [(index, phase) for index, phase in enumerate(result.phases) if phase.loss is not None]
    if not trained:
        return [Cell("Nothing was measured: no phase trained and no benchmark finished.")]
    index, phase = trained[-1]
    field, kind = ("loss", "training") if phase.val_loss is None else ("val_loss", "held-out")
    return [
        Cell(f"The last phase, {phase.id}, ended at a {kind} loss of "),
        Cell(number(float(getattr(phase, field) or 0.0)), f"phases[{index}].{field}", is_number=True),
        Cell(" after "),
        Cell(number(phase.tokens), f"phases[{index}].tokens", is_number=True),
        Cell(" tokens; no perplexity benchmark finished."),
    ]


def _against_teacher(student: Metric, metrics: dict[str, Metric]) -> list[Cell]:
    ratio = metrics.get(ratio_key("perplexity", student))
    if ratio is None:
        return [
            Cell("The student has a held-out perplexity of "),
            _value(student),
            *_interval(student),
            Cell("."),
        ]
    pieces = [Cell("The student has "), _value(ratio), Cell(" times the perplexity of its teacher")]
    pieces += _interval(ratio)
    cached = headline(metrics, "memory", "kv_bytes_per_token").get(STUDENT)
    fewer = metrics.get(ratio_key("kv_bytes_per_token", cached)) if cached is not None else None
    if fewer is not None:
        pieces += [Cell(" and "), _value(fewer), Cell(" times its cache bytes per token")]
    return [*pieces, Cell(".")]


def _value(metric: Metric) -> Cell:
    return Cell(number(metric.value), metric.key, is_number=True)


def _interval(metric: Metric) -> list[Cell]:
    error = metric.standard_error
    if not error:
        return []
    low, high = metric.value - Z_95 * error, metric.value + Z_95 * error
    return [Cell(f" (95% interval {number(low)} to {number(high)})")]
