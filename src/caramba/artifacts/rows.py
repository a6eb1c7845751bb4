"""Raw measurements as CSV: the rows of every benchmark of one type, one after another."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from caramba.errors import CarambaError
from caramba.result import HIDDEN_COLUMNS, BenchmarkResult, RunResult

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
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([ID_COLUMN, *columns])
    writer.writerows([[bench.id, *(_cell(row.get(name)) for name in columns)] for bench, row in listed])
    return text.getvalue()


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
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, dict | list | tuple) else value
