"""report.json: every number of a run by key, with its provenance, and the hashes of the files in its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

from caramba.artifacts.metrics import verdict_keys
from caramba.errors import CarambaError
from caramba.result import Artifact, Metric, RunResult, to_plain

SCHEMA = 1


@dataclass(frozen=True)
class Omission:
    """Something that has no data: a file, a panel ("summary.png: throughput") or a ratio."""

    name: str
    reason: str


def build_report(
    result: RunResult,
    metrics: dict[str, Metric],
    artifacts: tuple[Artifact, ...],
    omitted: tuple[Omission, ...],
) -> dict[str, Any]:
    """Return the report as plain JSON values.

    Raises:
        CarambaError: a value is NaN, infinite or not JSON; the message names its key.
    """
    failed = [bench for bench in result.benchmarks if not bench.succeeded]
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "name": result.name,
        "run_id": result.run_id,
        "manifest_sha256": result.manifest_sha256,
        "git_commit": result.git_commit,
        "labels": result.labels,
        "environment": result.environment,
        "plan": result.plan,
        "phases": result.phases,
        "transplant": result.transplant,
        "metrics": {key: _metric(metric) for key, metric in metrics.items()},
        "failures": [{"id": bench.id, "error": bench.error} for bench in failed],
        "verify": _verify(result),
        "artifacts": artifacts,
        "omitted": omitted,
    }
    plain = to_plain(report)
    refuse_unwritable(plain)
    return plain


def refuse_unwritable(value: Any, path: str = "") -> None:
    """Raise when a value at any depth is NaN, infinite, or of a type that JSON does not know."""
    if isinstance(value, dict):
        for key, item in cast("dict[str, Any]", value).items():
            refuse_unwritable(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            refuse_unwritable(item, f"{path}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise CarambaError(f"report.json {path}: got {value}, expected a finite number; say in words what failed")
    elif not isinstance(value, str | int | float | bool | None):
        kind = type(value).__name__
        raise CarambaError(f"report.json {path}: got {kind}, expected a JSON value; convert it where it is made")


def _metric(metric: Metric) -> dict[str, Any]:
    names = ("value", "unit", "n", "std", "standard_error", "source")
    return {name: getattr(metric, name) for name in names}


def _verify(result: RunResult) -> list[dict[str, Any]]:
    return [
        {
            "type": verdict.type,
            "run_id": verdict.run_id,
            "passed": verdict.passed,
            "fail_fast": verdict.fail_fast,
            "checks": [
                {
                    "key": key,
                    "name": check.name,
                    "value": check.value,
                    "bound": check.bound,
                    "is_minimum": check.is_minimum,
                    "unit": check.unit,
                    "passed": check.passed,
                }
                for key, check in zip(keys, verdict.checks, strict=True)
            ],
            "cases": verdict.cases,
        }
        for verdict, keys in zip(result.verdicts, verdict_keys(result.verdicts), strict=True)
    ]
