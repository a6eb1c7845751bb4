"""Raw measurements as CSV: the rows of every benchmark of one type, one after another."""

from __future__ import annotations

import json
from typing import Any

from caramba.artifacts.report import Omission
from caramba.errors import CarambaError
from caramba.result import HIDDEN_COLUMNS, Answer, BenchmarkResult, Case, RunResult, Verdict
from caramba.runs.files import csv_text

ID_COLUMN = "benchmark"


def to_csv(result: RunResult, kind: str) -> str | None:
    """Return the rows of the benchmarks of type `kind` as CSV text, or None when there are none.

    The first column is the benchmark's id; the others are the union of the rows' keys, in the order first
    seen. None is an empty cell, numbers keep every digit, and lists and mappings are written as JSON. What a row
    holds of every window stays in result.json.

    Raises:
        CarambaError: a row has a column that is called `benchmark` itself.
    """
    listed = [(bench, row) for bench in result.benchmarks if bench.type == kind for row in bench.rows]
    if not listed:
        return None
    columns = list(dict.fromkeys(name for bench, row in listed for name in _names(bench, row)))
    rows = ([bench.id, *(_cell(row.get(name)) for name in columns)] for bench, row in listed)
    return csv_text([[ID_COLUMN, *columns], *rows])


def collect_measured_rows(result: RunResult, kind: str) -> list[dict[str, Any]]:
    """Return the measured rows of the benchmarks of a type, in order."""
    listed = [row for bench in result.benchmarks if bench.type == kind for row in bench.rows]
    return [row for row in listed if row.get("skipped") is None]


def collect_skipped_rows(result: RunResult) -> list[Omission]:
    """Return the rungs and formats that could not be measured, with the reason."""
    return [
        Omission(f"{bench.id}: {row['model']}, {row[SKIPPING[bench.type]]}", str(row["skipped"]))
        for bench in result.benchmarks
        if bench.type in SKIPPING
        for row in bench.rows
        if row.get("skipped") is not None
    ]


def omit_if_asked(result: RunResult, kind: str, file: str) -> list[Omission]:
    """Return the omission of a file without rows where its benchmark was asked for, else nothing."""
    is_asked = any(bench.type == kind for bench in result.benchmarks)
    return [Omission(file, missing_reason(result, kind))] if is_asked else []


def missing_reason(result: RunResult, kind: str) -> str:
    """Say why there is no data of the benchmark type `kind`."""
    benches = [bench for bench in result.benchmarks if bench.type == kind]
    if not benches:
        return f"no {kind} benchmark ran"
    failed = [f"{bench.id}: {bench.error}" for bench in benches if bench.error is not None]
    if failed:
        return f"{kind} benchmark failed: {'; '.join(failed)}"
    return f"the {kind} benchmark measured nothing"


def _names(bench: BenchmarkResult, row: dict[str, Any]) -> list[str]:
    if ID_COLUMN in row:
        raise CarambaError(
            f"benchmark {bench.id!r}: a row has a column {ID_COLUMN!r}, which the CSV fills with the id; "
            "rename the column"
        )
    return [name for name in row if name not in HIDDEN_COLUMNS]


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value


SKIPPING = {"inference_ladder": "rung", "weights": "weights", "ladder": "row", "optimizers": "row"}
"""Benchmarks whose rows may have a reason for no measurement, with the column that separates a model's rows."""
CASES_FILE = "eval_cases.csv"
COLUMNS = (
    *("run_id", "case", "kind", "model", "is_correct", "expected", "answer", "text", "prompt"),
    *("choices", "logprobs", "logprobs_per_token", "length_normalized", "dropped_tokens"),
)


def collect_verdicts(result: RunResult) -> list[tuple[Verdict, Case]]:
    """Return every case with the verdict that it belongs to, in the order in which they were asked."""
    return [(verdict, case) for verdict in result.verdicts for case in verdict.cases]


def cases_csv(result: RunResult) -> str | None:
    """Return one row per case and model, or None without cases; lists are JSON, None is an empty cell."""
    rows = [_row(verdict, case, answer) for verdict, case in collect_verdicts(result) for answer in case.answers]
    return csv_text([COLUMNS, *rows]) if rows else None


def _row(verdict: Verdict, case: Case, answer: Answer) -> list[object]:
    def format_list(values: tuple[object, ...]) -> str:
        return json.dumps(values, ensure_ascii=False) if values else ""

    row: list[object] = [verdict.run_id, case.id, case.kind, answer.model, answer.is_correct, case.expected]
    row += [answer.answer, answer.text, case.prompt, format_list(case.choices)]
    row += [format_list(answer.logprobs), format_list(answer.logprobs_per_token), case.length_normalized]
    return [*row, case.dropped_tokens]
