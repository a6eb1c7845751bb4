"""The runs of a sweep or folder: the overrides, state and metrics of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from caramba.artifacts.across_runs.leaves import read_leaves
from caramba.errors import ConfigError
from caramba.runs import MANIFEST
from caramba.runs.events import EVENTS, metric_rows
from caramba.runs.index import read_indexed
from caramba.runs.manifest import OVERRIDES, plugin_sources, read_overrides
from caramba.runs.minting import runs_below
from caramba.runs.state import FAILED, FINISHED, WAITING, run_state
from caramba.runs.sweeps import is_sweep, list_sweeps, read_sweep, resolve_sweep

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What a damaged file, or one of an older schema, raises while it is read."""
DAMAGED = "damaged"
# How a run is carried out is no part of what it computes.
_NOT_SWEPT = ("launcher", "cluster", "resume", "manifest")


@dataclass(frozen=True)
class ReportedMetric:
    """A metric as a report has it; `std` is of its `n` samples within the run."""

    value: float
    unit: str = ""
    std: float | None = None
    n: int | None = None
    standard_error: float | None = None


@dataclass(frozen=True)
class RunRow:
    """One run, or a sweep point without one yet, with its command-line overrides and metrics.

    `proxy` is the origin of its teacher, if that was trained here; `sources` are the overrides with the source of its
    plugins. The state is DAMAGED where a file cannot be read; `problem` has the reason.
    """

    run: Path | None
    state: str
    words: dict[str, str]
    metrics: dict[str, ReportedMetric] = field(default_factory=dict[str, ReportedMetric])
    proxy: str = ""
    sources: frozenset[str] = frozenset()
    problem: str = ""

    @property
    def name(self) -> str:
        return self.run.name if self.run is not None else "-"


@dataclass(frozen=True)
class Gathered:
    """Runs of one folder; `title` names it to readers."""

    folder: Path
    title: str
    rows: list[RunRow]

    @property
    def finished(self) -> list[RunRow]:
        return [row for row in self.rows if row.state == FINISHED]

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the figures and tables of all runs."""
        proxies = dict.fromkeys(row.proxy for row in self.finished if row.proxy)
        return {"proxy": "; ".join(proxies)} if proxies else {}


def gather(text: str) -> Gathered:
    """Read the runs of a sweep, of `runs/NAME`, or of a folder of runs.

    Unfinished runs have no metrics.

    Raises:
        ConfigError: neither a sweep nor a run is there.
    """
    found = _gathered(text)
    return replace(found, rows=_told_apart(found.rows))


def _told_apart(rows: list[RunRow]) -> list[RunRow]:
    """Leave out a plugin source that is equal in all runs: it distinguishes no two of them."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for key in row.words.keys() & row.sources:
            values.setdefault(key, set()).add(row.words[key])
    alike = {key for key, found in values.items() if len(found) == 1}
    return [replace(row, words={key: word for key, word in row.words.items() if key not in alike}) for row in rows]


def _gathered(text: str) -> Gathered:
    folder = Path(text).expanduser()
    if is_sweep(folder) or not folder.is_dir():
        return _of_sweep(folder if is_sweep(folder) else resolve_sweep(text))
    runs = runs_below(folder)
    if not runs:
        sweeps = list_sweeps(folder)
        if sweeps:
            return _of_sweep(sweeps[-1])
        raise ConfigError(f"{text}: neither a sweep nor a run is there; give a sweep, runs/NAME, or a folder of runs")
    return Gathered(folder.absolute(), folder.absolute().name, read_rows(folder, runs))


def read_rows(folder: Path, runs: Sequence[Path]) -> list[RunRow]:
    """Read runs, those that have ended from the index of `folder`; metrics are those of report.json once finished."""

    def read(run: Path) -> tuple[str, bool]:
        row = _read_row(run)
        return _to_json(row), row.state in (FINISHED, FAILED)

    texts = read_indexed(folder, "row", runs, read)
    return [_from_json(run, text) for run, text in zip(runs, texts, strict=True)]


def _read_row(run: Path) -> RunRow:
    words: dict[str, str] = {}
    try:
        words = split_words(read_overrides(run))
        state = run_state(run).state
        sources = plugin_sources(run)
        words |= sources
        if state != FINISHED:
            return RunRow(run, state, words, sources=frozenset(sources))
        reports = list(_reports(run))
        proxy = _labels_of(reports).get("proxy", "")
        return RunRow(run, state, words, _metrics_of(reports), proxy, frozenset(sources))
    except UNREADABLE as error:
        return RunRow(run, DAMAGED, words, problem=f"{type(error).__name__}: {error}")


def _to_json(row: RunRow) -> str:
    metrics = {key: [item.value, item.unit, item.std, item.n, item.standard_error] for key, item in row.metrics.items()}
    # ASCII, so that names that are not UTF-8 pass.
    return json.dumps([row.state, row.words, metrics, row.proxy, sorted(row.sources), row.problem])


def _from_json(run: Path, text: str) -> RunRow:
    state, words, metrics, proxy, sources, problem = json.loads(text)
    measured = {key: ReportedMetric(*item) for key, item in metrics.items()}
    return RunRow(run, state, words, measured, proxy, frozenset(sources), problem)


def read_metrics(run: Path) -> dict[str, ReportedMetric]:
    """Return the metrics of a run's reports by key, with `loss.PHASE`, `val_loss.PHASE` and `seconds.PHASE`.

    Of a run of several groups every key begins with `GROUP/`. No report, no metrics.
    """
    return _metrics_of(_reports(run))


def check_readable(run: Path) -> None:
    """Refuse a run whose files cannot be compared, by the first that is damaged or of an older schema.

    Raises:
        ConfigError: naming the file.
    """
    folders = [run, *sorted(run.glob("groups/*"))]
    readers: list[tuple[Path, Callable[[], object]]] = [
        (run / MANIFEST, lambda: json.loads((run / MANIFEST).read_text(encoding="utf-8"))["groups"]),
        (run / OVERRIDES, lambda: read_overrides(run)),
        (run / "artifacts" / "report.json", lambda: (read_metrics(run), read_labels(run))),
        *((folder / EVENTS, lambda folder=folder: list(metric_rows(folder))) for folder in folders),
    ]
    for file, read in readers:
        try:
            read()
        except UNREADABLE as error:
            raise ConfigError(
                f"{file}: cannot be read ({type(error).__name__}: {error}); it is damaged, or of another version: "
                "leave the run out, or run it again (caramba rerun)"
            ) from None


def read_labels(run: Path) -> dict[str, str]:
    """Return what a run's reports say of where its numbers come from."""
    return _labels_of(_reports(run))


def _reports(run: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the reports of a run that has them, each with what its keys begin with."""
    files = [run / "artifacts" / "report.json"]
    for file in [*files, *sorted(run.glob("groups/*/artifacts/report.json"))]:
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        yield "" if file in files else f"{file.parents[1].name}/", report


def swept_keys(rows: Iterable[RunRow]) -> list[str]:
    """Return the keys whose values differ between the rows, in the order in which they were typed."""
    listed = list(rows)
    keys = dict.fromkeys(key for row in listed for key in row.words)
    return [
        key for key in keys if key.split(".")[0] not in _NOT_SWEPT and len({row.words.get(key) for row in listed}) > 1
    ]


def with_manifest_keys(rows: Sequence[RunRow], keys: Iterable[str]) -> list[RunRow]:
    """Return rows with the values of `keys` that no command line has, from the manifests.

    A key is that of a leaf, as `model.embedder.d_model` or `groups[quick].runs[global].train.lr`, or the end of keys
    that have one value in the manifest.
    """
    typed = {key for row in rows for key in row.words}
    sought = [key for key in keys if key not in typed]
    if not sought:
        return list(rows)
    found: list[RunRow] = []
    for row in rows:
        leaves = read_leaves(row.run) if row.run is not None else {}
        values: dict[str, str] = {}
        for key in sought:
            ends = [leaf for leaf in leaves if leaf.endswith(f".{key}")]
            leaf = key if key in leaves else ends[0] if len({leaves[end] for end in ends}) == 1 else None
            if leaf is not None:
                values[key] = leaves[leaf].strip('"')
        found.append(replace(row, words=row.words | values))
    return found


def is_seed(key: str) -> bool:
    """Whether a key is a seed: runs that differ in it alone are repetitions."""
    return key == "seed" or key.endswith(".seed")


def _metrics_of(reports: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, ReportedMetric]:
    return {f"{prefix}{key}": value for prefix, report in reports for key, value in _measured(report).items()}


def _labels_of(reports: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, str]:
    return {key: value for _, report in reports for key, value in report["labels"].items()}


def _measured(report: dict[str, Any]) -> dict[str, ReportedMetric]:
    found = {
        key: ReportedMetric(item["value"], item["unit"], item["std"], item["n"], item.get("standard_error"))
        for key, item in report["metrics"].items()
    }
    for phase in report["phases"]:
        if phase["loss"] is not None:
            found[f"loss.{phase['id']}"] = ReportedMetric(phase["loss"], "nats/token")
        if phase.get("val_loss") is not None:  # reports of before have none
            found[f"val_loss.{phase['id']}"] = ReportedMetric(phase["val_loss"], "nats/token")
        if phase["steps"]:
            found[f"seconds.{phase['id']}"] = ReportedMetric(phase["seconds"], "s")
    return found


def _of_sweep(folder: Path) -> Gathered:
    sweep = read_sweep(folder)
    shared = split_words(sweep.overrides)
    made = [sweep.run_of(point) for point in sweep.points]
    read = {row.run: row for row in read_rows(folder, [run for run in made if run is not None])}
    rows: list[RunRow] = []
    for point, run in zip(sweep.points, made, strict=True):
        words = {**shared, **split_words(point.overrides)}
        if run is None:
            rows.append(RunRow(None, point.state if point.state != FINISHED else WAITING, words))
            continue
        row = read[run]
        rows.append(replace(row, words=words | {key: row.words[key] for key in row.sources}))
    title = f"{folder.parents[1].name}/{folder.name}"
    return Gathered(folder, title, rows)


def split_words(overrides: Iterable[str]) -> dict[str, str]:
    """Return overrides by key; a deleted key is none."""
    pairs = (word.lstrip("+").partition("=") for word in overrides if not word.startswith("~"))
    return {key: value for key, equals, value in pairs if equals}
