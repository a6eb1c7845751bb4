"""Two runs side by side: their manifests, their metrics with intervals, and their training curves."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.artifacts.across_runs.gather import ReportedMetric, read_metrics
from caramba.artifacts.dispersion import standard_error
from caramba.artifacts.style import new_figure, styled, to_png
from caramba.artifacts.tables import number
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
