"""Paired tests of two models on the items that both answered, read from runs and from files of `caramba eval`."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from caramba.artifacts.across_runs.columns import align_columns
from caramba.artifacts.items import FILE, TaskComparison, TaskItems, compare_items, from_column, to_column
from caramba.artifacts.statistics import LEVEL, detectable_difference
from caramba.artifacts.tables import NOTHING, number
from caramba.errors import ConfigError

Key = tuple[str, str]  # task and metric
_METRICS_OF_ITEMS = ("acc", "acc_norm", "exact_match", "nll")


def compare_models(
    first: Path, second: Path, models: tuple[str, str], texts: Sequence[str] = ()
) -> list[TaskComparison]:
    """Compare two models on the items that both have; of each task the main metric.

    With `texts`, every metric whose `task.metric` holds one of them instead.

    Raises:
        ConfigError: a file that is not one of `caramba eval`.
    """
    ours, theirs = (
        read_main_items(path, model, texts) for path, model in zip((first, second), models, strict=True)
    )
    return compare_items(ours, theirs)


def format_comparisons(comparisons: Sequence[TaskComparison]) -> str:
    """Return the comparisons as aligned text, under a line that defines the columns."""
    head = (
        f"same items, B - A with its 95% interval (paired bootstrap); p (Holm) is adjusted for {len(comparisons)} "
        f"{'task' if len(comparisons) == 1 else 'tasks'}; * at most {LEVEL}; 'can see' is the difference found with "
        "power 80% at this disagreement"
    )
    rows = [("task", "metric", "items", "A", "B", "B - A", "interval", "p", "p (Holm)", "test", "can see")]
    for item in comparisons:
        test = item.test
        star = " *" if item.adjusted_p <= LEVEL else ""
        clustered = f", {test.n_clusters:,} clusters" if test.n_clusters < test.n else ""
        rows.append(
            (
                item.task,
                item.metric,
                f"{test.n:,}" + (f" ({item.unpaired:,} unpaired)" if item.unpaired else ""),
                number(test.first),
                number(test.second),
                f"{test.difference:+.4f}{star}",
                f"[{test.low:+.4f}, {test.high:+.4f}]",
                _p_text(test.p_value),
                _p_text(item.adjusted_p),
                test.test + clustered,
                _seen(item),
            )
        )
    return f"{head}\n{align_columns(rows, '  ')}"


def read_items(path: Path, model: str) -> Iterator[tuple[Key, TaskItems]]:
    """Yield the items of a model by task and metric: of a run's items.csv, or of a file of `caramba eval`."""
    if path.suffix == ".json":
        yield from _items_of_eval(path)
        return
    for file in (path / "artifacts" / FILE, *sorted(path.glob(f"groups/*/artifacts/{FILE}"))):
        if file.is_file():
            prefix = "" if file.parents[1] == path else f"{file.parents[1].name}/"
            for (task, metric), items in _items_of_csv(file, model).items():
                yield (f"{prefix}{task}", metric), items


def read_main_items(path: Path, model: str, texts: Sequence[str]) -> dict[Key, TaskItems]:
    """Return the items of each task's main metric, with `texts` those whose `task.metric` has one of them."""
    found = dict(read_items(path, model))
    if texts:
        return {key: items for key, items in found.items() if any(text in ".".join(key) for text in texts)}
    return {key: items for key, items in found.items() if items.is_main}


def _items_of_csv(file: Path, model: str) -> dict[Key, TaskItems]:
    columns: dict[Key, dict[str, Any]] = {}
    with open(file, encoding="utf-8", newline="") as stream:
        for row in csv.DictReader(stream):
            if row["model"] != model:
                continue
            empty: dict[str, Any] = {"ids": [], "texts": [], "clusters": [], "scores": []}
            column = columns.setdefault((row["task"], row["metric"]), empty)
            column["is_main"] = row["is_main"] == "1"
            column["ids"].append(row["item"])
            column["texts"].append(row["text_sha256"])
            column["clusters"].append(row["cluster"])
            column["scores"].append(float(row["score"]))
    return {key: from_column(column) for key, column in columns.items()}


def _items_of_eval(file: Path) -> Iterator[tuple[Key, TaskItems]]:
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
        yield from _items_of_plain(plain)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"compare: {file}: is not a file of caramba eval with items ({type(error).__name__}: {error}); run the "
            "evaluation again"
        ) from error


def _items_of_plain(plain: dict[str, Any]) -> Iterator[tuple[Key, TaskItems]]:
    for task, found in plain.get("tasks", {}).items():  # local tasks
        main = "nll" if found["main"] == "perplexity" and found["kind"] == "text" else found["main"]
        for metric in _METRICS_OF_ITEMS:
            if found["items"] and metric in found["items"][0]:
                yield (task, metric), from_column(to_column(found["items"], metric, is_main=metric == main))
    for task, scores in plain.get("items", {}).items():  # lm-evaluation-harness
        names = {key.partition(",")[0]: key for key in reversed(scores)}
        main = next((name for name in ("acc", "exact_match") if name in names), None)
        for name, key in names.items():
            yield (task, name), from_column(to_column(scores[key], name, is_main=name == main))
    if "tasks" not in plain and "items" not in plain:
        raise KeyError("tasks")


def _seen(item: TaskComparison) -> str:
    test = item.test
    if test.only_first is None or test.only_second is None:
        return NOTHING
    disagreement = (test.only_first + test.only_second) / test.n
    seen = detectable_difference(test.n, disagreement) if disagreement else None
    return NOTHING if seen is None else f"{100 * seen:.1f} points"


def _p_text(value: float) -> str:
    return "<0.0001" if value < 1e-4 else f"{value:.4f}"
