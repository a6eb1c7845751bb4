"""items.csv: the score of every item of every task, by which any two models are compared on the same items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from caramba.artifacts.statistics import PairedTest, holm, run_paired_test
from caramba.result import ITEMS, RunResult
from caramba.runs.files import csv_text

ITEMS_FILE = "items.csv"
COLUMNS = ("benchmark", "model", "task", "metric", "is_main", "item", "text_sha256", "cluster", "score")


@dataclass(frozen=True)
class TaskItems:
    """One score per item of a task.

    `texts` are sums of the items, which pair models on equal items only; items of one cluster share a text. `is_main`
    is whether the metric represents the task in a mean.
    """

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    clusters: tuple[str, ...]
    scores: tuple[float, ...]
    is_main: bool = True


@dataclass(frozen=True)
class TaskComparison:
    """Paired test of two models on the shared items of one task, with the p-value adjusted by Holm."""

    task: str
    metric: str
    test: PairedTest
    adjusted_p: float
    unpaired: int


def to_column(records: Sequence[Mapping[str, Any]], metric: str, *, is_main: bool) -> dict[str, Any]:
    """Return what a benchmark's row holds under ITEMS: lists of plain values, one entry an item."""
    return {
        "ids": [str(record["id"]) for record in records],
        "texts": [str(record["text_sha256"]) for record in records],
        "clusters": [str(record["cluster"]) for record in records],
        "scores": [float(record[metric]) for record in records],
        "is_main": is_main,
    }


def from_column(column: Mapping[str, Any]) -> TaskItems:
    """Return the items that a row holds."""
    lists = (tuple(column[name]) for name in ("ids", "texts", "clusters", "scores"))
    return TaskItems(*lists, is_main=bool(column["is_main"]))


def items_csv(result: RunResult) -> str | None:
    """Return one row for each model, task, metric and item, or None when no benchmark kept items."""
    listed = [
        (bench.id, row, from_column(cast("dict[str, Any]", row[ITEMS])))
        for bench in result.benchmarks
        for row in bench.rows
        if row.get(ITEMS) and not row.get("repeat")  # repeats score the same items again
    ]
    rows = [
        [bench, row["model"], row["task"], row["metric"], int(items.is_main), *item]
        for bench, row, items in listed
        for item in zip(items.ids, items.texts, items.clusters, items.scores, strict=True)
    ]
    return csv_text([COLUMNS, *rows]) if listed else None


def compare_items(
    first: Mapping[tuple[str, str], TaskItems], second: Mapping[tuple[str, str], TaskItems]
) -> list[TaskComparison]:
    """Compare two models on every (task, metric) that both have at least two equal items of.

    The p-values are adjusted for the number of tasks compared.
    """
    found: dict[tuple[str, str], tuple[PairedTest, int]] = {}
    for key in (key for key in first if key in second):
        pairs, unpaired = _pairs(first[key], second[key])
        if len(pairs) > 1:
            ours, theirs, clusters = (list(part) for part in zip(*pairs, strict=True))
            is_clustered = len(set(clusters)) < len(clusters)
            test = run_paired_test(
                cast("list[float]", ours),
                cast("list[float]", theirs),
                cast("list[str]", clusters) if is_clustered else None,
            )
            found[key] = (test, unpaired)
    adjusted = holm({"\0".join(key): test.p_value for key, (test, _) in found.items()})
    return [TaskComparison(*key, test, adjusted["\0".join(key)], unpaired) for key, (test, unpaired) in found.items()]


def _pairs(first: TaskItems, second: TaskItems) -> tuple[list[tuple[float, float, str]], int]:
    """Return the scores and clusters of the items that both have, and how many items only one has."""
    names = [list(zip(items.ids, items.texts, strict=True)) for items in (first, second)]
    theirs = dict(zip(names[1], second.scores, strict=True))
    pairs = [
        (score, theirs[name], cluster)
        for name, score, cluster in zip(names[0], first.scores, first.clusters, strict=True)
        if name in theirs
    ]
    return pairs, len(set(names[0]) ^ set(names[1]))
