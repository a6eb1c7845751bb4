"""One run and tables of runs, for Python: `caramba.launch` returns the first and `caramba.runs` the second."""

from __future__ import annotations

import html
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from caramba.artifacts.across_runs.gather import ReportedMetric, RunRow, gather, read_metrics, swept_keys
from caramba.artifacts.across_runs.summary import choose_metrics
from caramba.config.manifest import Manifest
from caramba.console import align_columns
from caramba.errors import ConfigError, nearest
from caramba.runs.events import metric_rows
from caramba.runs.manifest import read_manifest, read_overrides
from caramba.runs.state import RunState, run_state


@dataclass(frozen=True)
class Run:
    """A run directory. Every property reads its files as they are now, also while the run trains.

    Functions that take a path take a Run too.
    """

    path: Path

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:
        """Experiment and run, as in `smoke/20260102-030405-1a2b`."""
        return f"{self.path.parent.name}/{self.path.name}"

    @property
    def status(self) -> RunState:
        """State, phase, step, times and error."""
        return run_state(self.path)

    @property
    def state(self) -> str:
        """One of running, finished, failed, interrupted and waiting."""
        return self.status.state

    @property
    def manifest(self) -> Manifest:
        """The frozen manifest."""
        return read_manifest(self.path)

    @property
    def overrides(self) -> tuple[str, ...]:
        """The words of the command line."""
        return read_overrides(self.path)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the report by key, with `loss.PHASE`, `val_loss.PHASE`, `seconds.PHASE`; else empty."""
        return {key: item.value for key, item in self.measured.items()}

    @property
    def measured(self) -> dict[str, ReportedMetric]:
        """Metrics with unit, deviation and number of samples."""
        return read_metrics(self.path)

    @property
    def report(self) -> dict[str, Any]:
        """The content of report.json.

        Raises:
            ConfigError: the run has no report, or one for each of several groups.
        """
        file = self.path / "artifacts" / "report.json"
        if file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
        groups = [found.parents[1].name for found in sorted(self.path.glob("groups/*/artifacts/report.json"))]
        what = f"one report for each group: {', '.join(groups)}" if groups else f"no report; it is {self.state}"
        raise ConfigError(f"{self.name}: has {what}")

    def history(self, phase: str | None = None, group: str | None = None) -> list[dict[str, Any]]:
        """Return one mapping for each logged step of a phase, by default of all phases: phase, step and metrics.

        Raises:
            ConfigError: no such phase or group.
        """
        folder = self.path if group is None else self.path / "groups" / group
        if group is not None and not folder.is_dir():
            groups = [item.name for item in sorted(self.path.glob("groups/*"))]
            raise ConfigError(f"{self.name}: has no group {group!r}{nearest(group, groups)}")
        rows: dict[tuple[str, int], dict[str, Any]] = {}
        for name, step, values in metric_rows(folder):
            rows.setdefault((name, step), {"phase": name, "step": step}).update(values)
        phases = list(dict.fromkeys(name for name, _ in rows))
        if phase is not None and phase not in phases:
            raise ConfigError(
                f"{self.name}: has no metrics of phase {phase!r}{nearest(phase, phases) or ';'} phases: "
                f"{', '.join(phases) or 'none yet'}"
            )
        return [row for row in rows.values() if phase in (None, row["phase"])]

    def __repr__(self) -> str:
        return f"Run({self.name}, {self.state})"


@dataclass(frozen=True)
class RunTable(Sequence[Run]):
    """Runs of one folder, with the keys in which they differ.

    `rows` and the data frame have all metrics, or those of `metrics`; the printed table has the main ones.
    """

    folder: Path
    title: str
    found: tuple[RunRow, ...]
    metrics: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(Run(row.run) for row in self.found if row.run is not None)

    @property
    def columns(self) -> tuple[str, ...]:
        """`run`, `state`, the keys that differ between the runs, and the metrics."""
        metrics = self.metrics or dict.fromkeys(key for row in self.found for key in row.metrics)
        return ("run", "state", *swept_keys(self.found), *metrics)

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping for each run, and for each sweep point without a run; None where a value is unknown."""
        columns = self.columns
        return [
            {column: values.get(column) for column in columns}
            for values in (
                {"run": row.name, "state": row.state}
                | row.words
                | {key: item.value for key, item in row.metrics.items()}
                for row in self.found
            )
        ]

    def to_pandas(self) -> Any:
        """Return the table as a pandas data frame, one row for each run.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            pandas: Any = importlib.import_module("pandas")
        except ImportError as error:
            raise ConfigError(
                "runs: to_pandas needs pandas, which is not installed; run pip install pandas, or use rows()"
            ) from error
        return pandas.DataFrame(self.rows(), columns=list(self.columns))

    def __len__(self) -> int:
        return len(self.runs)

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        return self.runs[index]

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __repr__(self) -> str:
        return align_columns(self._cells())

    def _repr_html_(self) -> str:
        """The table as Jupyter shows it."""
        head, *lines = (
            "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
            for tag, line in zip(("th", *["td"] * len(self.found)), self._cells(), strict=True)
        )
        rows = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def _cells(self) -> list[list[str]]:
        has_metrics = any(row.metrics for row in self.found)
        metrics = choose_metrics(self.found, self.metrics) if has_metrics else []
        columns = ["run", "state", *swept_keys(self.found), *metrics]
        return [columns, *([_text(row[column]) for column in columns] for row in self.rows())]


def runs(folder: str | os.PathLike[str] = "runs", *, metrics: Sequence[str] = ()) -> RunTable:
    """Return the runs of a folder as a table: of `runs`, of `runs/NAME`, or of a sweep.

    Unfinished runs have no metrics. `metrics` are the keys of the columns; by default all.

    Raises:
        ConfigError: neither a sweep nor a run is there, or no run has a metric of that name.
    """
    found = gather(os.fspath(folder))
    if metrics:
        choose_metrics(found.rows, metrics)
    return RunTable(found.folder, found.title, tuple(found.rows), tuple(metrics))


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
