"""decisions.jsonl: what the orchestrator has seen and decided, one JSON object a decision."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.runs.files import write_whole

DECISIONS = "decisions.jsonl"
OF_TRIALS = (
    "orchestrator_policy",
    "orchestrator_decisions",
    "orchestrator_budget",
    "orchestrator_eval_horizon",
    "orchestrator_repeats",
    "orchestrator_min_steps_between_switches",
)
"""Keys by which a run that replays decisions may differ from the run that took them."""


def digest_of(phase: PhaseConfig, spec: str, windows: Any, seed: int, start: int) -> str:
    """Return what decisions hold for: the model, the windows and their order, and the phase but for its trials."""
    trained = phase.model_dump(mode="json", exclude=set(OF_TRIALS))
    n = len(windows)
    text = [windows[at][0].tolist() for at in sorted({0, n // 2, n - 1})]
    described = json.dumps([spec, n, text, trained, seed, start], sort_keys=True)
    return hashlib.sha256(described.encode()).hexdigest()[:16]


class Journal:
    """Writes the decisions of a phase; one rank `writes`, all keep them.

    A file is written whole at each decision: there are few. Decisions after the step that a run resumes from are taken
    again, and dropped.
    """

    def __init__(self, path: Path, phase: str, digest: str, *, writes: bool) -> None:
        self.path, self.phase, self.digest, self.writes = path, phase, digest, writes
        self.records = list(read_decisions(path)) if path.is_file() else []

    def keep_before(self, step: int) -> None:
        """Drop what this phase has recorded at `step` and later.

        Answers to the step before go as well: the guard reads it again at `step`.
        """
        self.records = [
            one
            for one in self.records
            if one["phase"] != self.phase or one["step"] < step - ("safety" in one)
        ]

    def add(self, step: int, **values: Any) -> dict[str, Any]:
        """Record one decision and return it."""
        record = {"phase": self.phase, "manifest": self.digest, "step": step, **values}
        self.records.append(_plain(record))
        if self.writes:
            lines = (json.dumps(one, ensure_ascii=False, allow_nan=False) + "\n" for one in self.records)
            write_whole(self.path, "".join(lines))
        return record


def read_decisions(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the decisions of a file.

    Raises:
        ConfigError: a line that is no decision, by its number.
    """
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
            assert isinstance(record["step"], int)
            assert isinstance(record["phase"], str)
            assert isinstance(record["choice"], str)
        except (ValueError, KeyError, TypeError, AssertionError):
            raise ConfigError(
                f"{path}:{number}: expected a JSON object with phase, step and choice, got {line[:80]!r}; give the "
                "decisions.jsonl of a run"
            ) from None
        yield record


def choices_to_replay(path: Path, phase: str, digest: str, strategies: Any) -> dict[int, str]:
    """Return the strategy of each step at which an earlier run has decided.

    Raises:
        ConfigError: no such file, another manifest's, none of this phase, or an unknown strategy.
    """
    if not path.is_file():
        raise ConfigError(
            f"train.orchestrator_decisions={path}: no such file; give the decisions.jsonl of a run"
        )
    own = [one for one in read_decisions(path) if one["phase"] == phase and "safety" not in one]
    if not own:
        raise ConfigError(
            f"{path}: has no decision of phase {phase!r}; give the file of a run with that phase"
        )
    for one in own:
        if one.get("manifest") != digest:
            raise ConfigError(
                f"{path}: decisions of another manifest, {one.get('manifest')}, expected {digest}: model, data, seed "
                f"or the keys of phase {phase!r} differ; run them unchanged, or decide again with "
                "orchestrator_policy=halving"
            )
        if one["choice"] not in strategies:
            raise ConfigError(
                f"{path}: step {one['step']} chose {one['choice']!r}, expected one of {', '.join(strategies)}"
            )
    return {one["step"]: one["choice"] for one in own}


def _plain(value: Any) -> Any:
    """Return a value in JSON's types; NaN and infinities as strings, so that they are not lost."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
