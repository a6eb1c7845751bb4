"""More than two runs next to each other: only what differs of their manifests, their metrics, and paired tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from caramba.artifacts.across_runs.columns import align_columns
from caramba.artifacts.across_runs.gather import ReportedMetric
from caramba.artifacts.across_runs.leaves import read_leaves
from caramba.artifacts.across_runs.paired import read_main_items
from caramba.artifacts.dispersion import standard_error
from caramba.artifacts.items import TaskComparison, compare_items
from caramba.artifacts.statistics import LEVEL, holm
from caramba.artifacts.tables import NOTHING, number

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_CELL = 28


def column_letter(index: int) -> str:
    """Return the name of a column: A to Z, then A1, B1, and so on."""
    round_, place = divmod(index, len(LETTERS))
    return LETTERS[place] + (str(round_) if round_ else "")


def format_differing(runs: Sequence[Path]) -> str:
    """Return the manifest keys in which the runs differ, a column for each run."""
    leaves = [read_leaves(run) for run in runs]
    keys = dict.fromkeys(key for found in leaves for key in found)
    differing = [key for key in keys if len({found.get(key) for found in leaves}) > 1]
    if not differing:
        return "manifests: equal"
    rows = [("", *(column_letter(index) for index in range(len(runs))))]
    rows += [(key, *(_cut(found.get(key, NOTHING)) for found in leaves)) for key in differing]
    return f"manifests: {len(differing)} keys differ\n{align_columns(rows, '  ')}"


def format_metrics(metrics: Sequence[dict[str, ReportedMetric]], texts: Sequence[str], most: int) -> str:
    """Return the metrics in which runs differ, with standard errors; with `texts` all whose key has one of them."""
    keys = dict.fromkeys(key for found in metrics for key in found)
    shown = [
        key
        for key in keys
        if sum(key in found for found in metrics) > 1
        and (any(text in key for text in texts) if texts else _differs(key, metrics))
    ]
    if not shown:
        return ""
    rows = [("", *(column_letter(index) for index in range(len(metrics))))]
    cut = shown if texts else shown[:most]
    rows += [(key, *(_value(key, found.get(key)) for found in metrics)) for key in cut]
    more = f"\n  \u2026 {len(shown) - len(cut)} more: --metric TEXT" if len(shown) > len(cut) else ""
    return f"metrics; \u00b1 is the standard error\n{align_columns(rows, '  ')}{more}"


def compare_with_first(
    runs: Sequence[Path], model: str, texts: Sequence[str] = ()
) -> list[tuple[int, TaskComparison, float]]:
    """Return paired tests of every run against the first: its index, the test, and p adjusted over all of them."""
    items = [read_main_items(run, model, texts) for run in runs]
    found = [
        (index, comparison)
        for index, theirs in enumerate(items[1:], start=1)
        for comparison in compare_items(items[0], theirs)
    ]
    adjusted = holm({str(place): comparison.test.p_value for place, (_, comparison) in enumerate(found)})
    return [(index, comparison, adjusted[str(place)]) for place, (index, comparison) in enumerate(found)]


def format_paired(found: Sequence[tuple[int, TaskComparison, float]]) -> str:
    """Return the paired tests as a table, under a line that defines the columns."""
    head = (
        "same items, run - A with its 95% interval (paired bootstrap); p (Holm) is adjusted for all "
        f"{len(found)} tests; * at most {LEVEL}"
    )
    rows = [("task", "metric", "run", "items", "A", "run", "run - A", "interval", "p (Holm)")]
    for index, item, adjusted in found:
        test = item.test
        rows.append(
            (
                item.task,
                item.metric,
                column_letter(index),
                f"{test.n:,}",
                number(test.first),
                number(test.second),
                f"{test.difference:+.4f}{' *' if adjusted <= LEVEL else ''}",
                f"[{test.low:+.4f}, {test.high:+.4f}]",
                f"{adjusted:.4f}" if adjusted >= 1e-4 else "<0.0001",
            )
        )
    return f"{head}\n{align_columns(rows, '  ')}"


def _differs(key: str, metrics: Sequence[dict[str, ReportedMetric]]) -> bool:
    return len({found[key].value for found in metrics if key in found}) > 1


def _value(key: str, measured: ReportedMetric | None) -> str:
    if measured is None:
        return NOTHING
    error = standard_error(key, measured.std, measured.n, measured.standard_error)
    return number(measured.value) + (f" \u00b1 {number(error)}" if error else "")


def _cut(text: str) -> str:
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}\u2026"
