"""Two runs side by side: their manifests, their metrics with intervals, and their training curves."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.artifacts.across_runs.gather import ReportedMetric, read_metrics
from caramba.artifacts.across_runs.leaves import read_leaves
from caramba.artifacts.items import (
    ITEMS_FILE,
    TaskComparison,
    TaskItems,
    compare_items,
    from_column,
    to_column,
)
from caramba.artifacts.metrics import standard_error
from caramba.artifacts.statistics import LEVEL, detectable_difference, holm
from caramba.artifacts.style import new_figure, styled, to_png
from caramba.artifacts.tables import NOTHING, number
from caramba.console import align_columns
from caramba.errors import ConfigError
from caramba.runs import MANIFEST, differences
from caramba.runs.events import read_events
from caramba.runs.manifest import plugin_sources

# The normal quantile of a two-sided 95% interval.
Z_95 = 1.959964
_CURVES = ("running_loss", "loss", "val_loss")
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Difference:
    """One metric of two runs: B minus A, and the half width of its 95% interval where both report a deviation."""

    key: str
    first: ReportedMetric
    second: ReportedMetric
    half_width: float | None

    @property
    def value(self) -> float:
        return self.second.value - self.first.value

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves out zero."""
        return self.half_width is not None and abs(self.value) > self.half_width


def manifest_differences(first: Path, second: Path) -> list[str]:
    """Return `key: old -> new` for what two manifests differ in, and the source of their plugins; manifests are read as
    plain JSON, whatever their schema."""
    plain = [json.loads((run / MANIFEST).read_text(encoding="utf-8")) for run in (first, second)]
    return [*differences(*plain), *differences(plugin_sources(first), plugin_sources(second))]


def metric_differences(first: Path, second: Path, texts: Sequence[str] = ()) -> list[Difference]:
    """Return the metrics that both runs have, those whose key holds one of `texts` when there are any.

    With standard errors s_A and s_B, taken as independent, the interval is B - A ± 1.96 sqrt(s_A^2 + s_B^2).
    """
    ours, theirs = read_metrics(first), read_metrics(second)
    keys = [key for key in ours if key in theirs and (not texts or any(text in key for text in texts))]
    return [Difference(key, ours[key], theirs[key], _half_width(key, ours[key], theirs[key])) for key in keys]


def _half_width(key: str, first: ReportedMetric, second: ReportedMetric) -> float | None:
    errors = [standard_error(key, item.std, item.n, item.standard_error) for item in (first, second)]
    return None if errors[0] is None or errors[1] is None else Z_95 * math.hypot(errors[0], errors[1])


def interval_text(key: str, measured: ReportedMetric) -> str:
    """Return a value, with its 95% interval where the report has what it takes."""
    error = standard_error(key, measured.std, measured.n, measured.standard_error)
    return number(measured.value) + (f" ± {number(Z_95 * error)}" if error else "")


def curves_of(run: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the loss of every phase by step, `GROUP/PHASE` in a run of several groups; a repeated step counts once."""
    found: dict[str, dict[int, float]] = {}
    for folder in (run, *sorted(run.glob("groups/*"))):
        prefix = "" if folder == run else f"{folder.name}/"
        for event in read_events(folder):
            values = event.get("values") if event.get("event") == "metrics" else None
            name = next((name for name in _CURVES if values and isinstance(values.get(name), float)), None)
            if values is not None and name in _CURVES[:2]:
                found.setdefault(f"{prefix}{event['phase']}", {})[int(event["step"])] = values[name]
    return {phase: sorted(points.items()) for phase, points in found.items()}


def draw_curves(runs: Sequence[Path]) -> bytes | None:
    """Return a PNG with the losses of all runs in one panel per phase; None when none trained."""
    curves = [curves_of(run) for run in runs]
    phases = list(dict.fromkeys(phase for found in curves for phase in found))
    if not phases:
        return None
    is_one_experiment = len({run.parent.name for run in runs}) == 1
    labels = [run.name if is_one_experiment else f"{run.parent.name}/{run.name}" for run in runs]
    with styled():
        columns = min(3, len(phases))
        # One legend is below all panels: of many runs it would hide the curves of any.
        figure = new_figure(4.6 * columns + 0.4, 3.6 * -(-len(phases) // columns) + 0.2 * len(runs))
        panels: Any = figure.subplots(-(-len(phases) // columns), columns, squeeze=False).flat
        for axes, phase in zip(panels, phases, strict=False):
            for index, (found, label) in enumerate(zip(curves, labels, strict=True)):
                points = found.get(phase, [])
                axes.plot(
                    [step for step, _ in points],
                    [loss for _, loss in points],
                    _DASHES[index // len(_COLOURS) % len(_DASHES)] if len(runs) > 2 else _DASHES[index],
                    color=_COLOURS[index % len(_COLOURS)],
                    label=label,
                )
            axes.set_title(phase)
            axes.set_xlabel("step")
            axes.set_ylabel("loss")
        for axes in list(panels)[len(phases) :]:
            axes.set_visible(False)
        handles, names = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower left")
        return to_png(figure, {})


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
    ours, theirs = (read_main_items(path, model, texts) for path, model in zip((first, second), models, strict=True))
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
    for file in (path / "artifacts" / ITEMS_FILE, *sorted(path.glob(f"groups/*/artifacts/{ITEMS_FILE}"))):
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
