"""What the studio shows of one run, read from its files; what cannot be read is listed, and the rest is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from caramba.artifacts.across_runs.gather import UNREADABLE, read_labels, read_metrics, split_words
from caramba.artifacts.across_runs.leaves import MOST_TEXT, flatten
from caramba.artifacts.dispersion import is_standard_error
from caramba.artifacts.studio.curve import Curve, read_phases
from caramba.runs.events import EVENTS
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
    record.manifest_sha256 = read(
        MANIFEST, lambda: hashlib.sha256((run / MANIFEST).read_bytes()).hexdigest(), ""
    )
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
