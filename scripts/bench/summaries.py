"""Means over seeds and their intervals, and one file of several runs of a case."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import Record, Row
from registry import UsageError

from caramba.train.orchestration.policies import compute_interval


def differences(ours: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Return ours minus the others', by seeds that both have."""
    return {seed: value - others[seed] for seed, value in ours.items() if seed in others}


def interval(by_seed: Mapping[int, float]) -> Row:
    """Return the mean over seeds and Student's 95% interval; one seed has none, and its ends are None."""
    found = compute_interval(list(by_seed.values()))
    has_width = len(by_seed) > 1
    ends = {"low": found.low if has_width else None, "high": found.high if has_width else None}
    return {"mean": found.mean, **ends, "seeds": len(by_seed)}


def join(record: Record, files: Sequence[str], *, equal: Collection[str], by: Collection[str]) -> None:
    """Make the record of several files of one case: their rows, each with the commit that measured it.

    Of rows that are alike in the keys `by` the last file's stays. Other keys are those of the first file that has them.

    Raises:
        UsageError: files that differ in a key of `equal`, which rows depend on.
    """
    parts: list[dict[str, Any]] = [json.loads(Path(file).read_text()) for file in files]
    for file, part in zip(files, parts, strict=True):
        for key in equal:
            if part.get(key) != parts[0].get(key):
                raise UsageError(
                    f"--join {file}: got {key} {part.get(key)}, expected {parts[0].get(key)} as in {files[0]}; join "
                    "runs of equal sizes"
                )
    rows: dict[tuple[Any, ...], Row] = {}
    for part in parts:
        commit = part["machine"].get("commit")
        for row in part["rows"]:
            rows[tuple(row.get(key) for key in by)] = {"commit": commit} | row
    record.data = {key: value for part in reversed(parts) for key, value in part.items()}
    measured = {str(row.get("case", "")) for row in rows.values()}
    left_out = [text for part in parts for text in part.get("left_out", []) if text.partition(":")[0] not in measured]
    made_by = list(dict.fromkeys(part["made_by"] for part in parts))
    record.save(rows=list(rows.values()), left_out=list(dict.fromkeys(left_out)), made_by="; ".join(made_by))
