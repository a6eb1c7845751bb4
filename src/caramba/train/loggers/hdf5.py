"""metrics.h5: the metrics of a run as arrays, readable during the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.rank_zero import rank_zero_only

from caramba.runs.events import metric_rows
from caramba.runs.files import whole_file
from caramba.train.loggers.events import RunLogger

FILE = "metrics.h5"
CHUNK = 256


class Hdf5Logger(RunLogger):
    """Appends each row of metrics to /PHASE/METRIC, a dataset of (step int64, value float64).

    Metrics PREFIX/LAYER of one row together are /PHASE/PREFIX, a dataset of (step, values float64 [L]) whose attribute
    `layers` names the columns; a layer that a row lacks is NaN. The file is in SWMR mode: a reader that opens it with
    `swmr=True` sees the rows as they come. A metric or layer that is new to the file, the beginning of a phase and a
    resumed run write the whole file again from events.jsonl, so a reader opens it again to see what is new.
    """

    def __init__(self, run_dir: Path, phase: str) -> None:
        super().__init__(run_dir, phase)
        self._file: Any = None

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Hyperparameters are in manifest.json."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = by_layer({key: value for key, value in metrics.items() if key != "epoch"})
        if self._file is None or not _fits(self._file.get(self.phase), row):
            self._close()
            write_file(self.run_dir)  # events.jsonl has this row already
            self._file = _open(self.run_dir / FILE)
            return
        _append(self._file[self.phase], step or 0, row)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def by_layer(metrics: Mapping[str, float]) -> dict[str, float | dict[str, float]]:
    """Put metrics PREFIX/LAYER together under PREFIX."""
    row: dict[str, float | dict[str, float]] = {}
    for key, value in metrics.items():
        prefix, slash, layer = key.partition("/")
        if slash:
            layers = row.setdefault(f"{prefix}_by_layer" if prefix in metrics else prefix, {})
            assert isinstance(layers, dict)
            layers[layer] = value
        else:
            row[key] = value
    return row


def write_file(run_dir: Path) -> None:
    """Write metrics.h5 whole, with every metric that events.jsonl has."""
    import h5py

    phases: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for phase, step, values in metric_rows(run_dir):
        phases.setdefault(phase, []).append((step, values))
    # Nobody else opens the file before it is whole, and some file systems have no locks.
    with (
        whole_file(run_dir / FILE) as temporary,
        h5py.File(temporary, "w", libver="latest", locking=False) as file,
    ):
        for phase, rows in phases.items():
            _write_phase(file.create_group(phase), [(step, by_layer(values)) for step, values in rows])


def _write_phase(group: Any, rows: list[tuple[int, dict[str, float | dict[str, float]]]]) -> None:
    layers: dict[str, dict[str, None]] = {}
    for _, row in rows:
        for name, value in row.items():
            own = layers.setdefault(name, {})
            own |= dict.fromkeys(value if isinstance(value, dict) else ())
    for name, own in layers.items():
        columns = tuple(own)
        kind = [("step", "i8"), ("values", "f8", (len(own),)) if own else ("value", "f8")]
        data = np.array([(step, _cell(row[name], columns)) for step, row in rows if name in row], dtype=kind)
        dataset = group.create_dataset(name, data=data, maxshape=(None,), chunks=(CHUNK,))
        if own:
            dataset.attrs["layers"] = list(own)


def _cell(value: float | dict[str, float], columns: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return tuple(value.get(name, math.nan) for name in columns)
    return value


def _open(path: Path) -> Any:
    import h5py

    file = h5py.File(path, "r+", libver="latest")
    file.swmr_mode = True
    return file


def _fits(group: Any, row: dict[str, float | dict[str, float]]) -> bool:
    """Whether every metric and layer of a row has its place; SWMR mode can add none."""
    if group is None:
        return False
    for name, value in row.items():
        if name not in group or not set(value if isinstance(value, dict) else ()) <= set(_layers(group[name])):
            return False
    return True


def _layers(dataset: Any) -> tuple[str, ...]:
    return tuple(dataset.attrs.get("layers", ()))


def _append(group: Any, step: int, row: dict[str, float | dict[str, float]]) -> None:
    for name, value in row.items():
        dataset = group[name]
        dataset.resize((len(dataset) + 1,))
        dataset[-1] = np.array((step, _cell(value, _layers(dataset))), dtype=dataset.dtype)
        dataset.flush()
