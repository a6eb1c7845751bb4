"""The facts at the head of a report: when, how long, by which command, and of which model, data, device and source."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from caramba.result import RunResult
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


def facts_of(
    run_dir: Path, labels: dict[str, str], environment: dict[str, Any], git_commit: str | None
) -> list[Fact]:
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
    return (
        duration_text(seconds) + (f", sum of {n_sittings} sittings" if n_sittings > 1 else "") + " (training)"
    )


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
