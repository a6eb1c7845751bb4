"""training.png: loss, held-out loss, learning rate and throughput of every phase, with the borders between phases."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caramba.artifacts.report import Omission
from caramba.artifacts.style import (
    FAINT,
    Picture,
    label_ticks,
    log10_axis,
    new_figure,
    short_number,
    styled,
    to_picture,
)
from caramba.runs.events import MEMORY_SLOTS, metric_rows, read_events

TRAINING_FILE = "training.png"
POINTS = 500  # of a line; more cannot be seen at page size
_LOSS, _HELD_OUT, _RATE, _SPEED = "#0072B2", "#D55E00", "#009E73", "#555555"
_LOG_SPREAD = 20.0

Points = list[tuple[int, float]]


@dataclass
class PhaseCurves:
    """What one phase recorded, by its own steps; a step that was repeated after a resume counts once."""

    phase: str
    start: int = 0
    steps: int = 0
    loss: dict[int, float] = field(default_factory=lambda: {})
    held_out: dict[int, float] = field(default_factory=lambda: {})
    rate: dict[int, float] = field(default_factory=lambda: {})
    speed: dict[int, float] = field(default_factory=lambda: {})

    def place_points(self, values: dict[int, float]) -> Points:
        """Return values by the step of the whole run, thinned to at most POINTS."""
        listed = sorted((self.start + step, value) for step, value in values.items() if math.isfinite(value))
        every = math.ceil(len(listed) / POINTS)
        return listed[:: max(1, every)]


def read_curves(run_dir: Path) -> list[PhaseCurves]:
    """Return the curves of every phase of a run in the order of training; none where nothing was recorded."""
    found: dict[str, PhaseCurves] = {}
    for phase, step, values in metric_rows(run_dir):
        curves = found.setdefault(phase, PhaseCurves(phase))
        curves.steps = max(curves.steps, step)
        for name, kept in (
            ("running_loss", curves.loss),
            ("val_loss", curves.held_out),
            ("lr", curves.rate),
            ("tokens_per_s", curves.speed),
        ):
            if name in values:
                kept[step] = values[name]
    start = 0
    for curves in found.values():
        curves.start = start
        start += curves.steps
    return list(found.values())


def draw_training(run_dir: Path, labels: dict[str, str]) -> tuple[Picture | None, list[Omission]]:
    """Return the curves of a run, one panel under another, or why there are none."""
    phases = read_curves(run_dir)
    if not phases:
        return None, []
    panels = [
        ("loss (lower is better)", (("loss", _LOSS, "training"), ("held_out", _HELD_OUT, "held out"))),
        ("learning rate", (("rate", _RATE, ""),)),
        ("tokens/s", (("speed", _SPEED, ""),)),
    ]
    shown = [
        (unit, lines) for unit, lines in panels if any(getattr(phase, name) for phase in phases for name, *_ in lines)
    ]
    if not shown:
        return None, [Omission(TRAINING_FILE, "no phase recorded a loss")]
    with styled():
        heights = [2.8 if index == 0 else 1.9 for index in range(len(shown))]
        figure = new_figure(9.0, sum(heights) + 0.9)
        grid = figure.subplots(len(shown), 1, sharex=True, height_ratios=heights, squeeze=False)[:, 0]
        for axes, (unit, lines) in zip(grid, shown, strict=True):
            _draw_panel(axes, phases, unit, lines)
        _mark_decisions(grid[0], phases, run_dir)
        _name_phases(grid[0], phases)
        grid[-1].set_xlabel("step of the run")
        label_ticks(grid[-1].xaxis, short_number)
        return to_picture(figure, labels), []


def _draw_panel(axes: Any, phases: list[PhaseCurves], unit: str, lines: Any) -> None:
    values: list[float] = []
    for name, colour, label in lines:
        is_named = False
        for phase in phases:
            points = phase.place_points(getattr(phase, name))
            if not points:
                continue
            values += [value for _, value in points]
            # Phases optimise different losses, so their lines do not join.
            axes.plot(
                *zip(*points, strict=True),
                color=colour,
                lw=1.6,
                marker="o" if name == "held_out" or len(points) == 1 else None,
                markersize=4,
                label=label if label and not is_named else None,
            )
            is_named = True
    if min(values) > 0 and max(values) / min(values) > _LOG_SPREAD:
        log10_axis(axes)
        unit += "\nlog scale"
    label_ticks(axes.yaxis, short_number)
    axes.set_ylabel(unit, fontsize=10)
    for phase in phases[1:]:
        axes.axvline(phase.start, color="#999999", ls="--", lw=1)
    axes.grid(visible=True, color=FAINT)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        axes.legend(loc="best")


def read_marks(run_dir: Path) -> list[tuple[str, int, str]]:
    """Return (phase, step, words) of an orchestrated run's switches of strategy and answers to spikes."""
    path = run_dir / "decisions.jsonl"
    if not path.is_file():
        return []
    found: list[tuple[str, int, str]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if "safety" in one:
            found.append((one["phase"], one["step"], str(one["safety"])))
        elif one["choice"] != one.get("strategy", one["choice"]):
            found.append((one["phase"], one["step"], str(one["choice"])))
    return found


def _mark_decisions(axes: Any, phases: list[PhaseCurves], run_dir: Path) -> None:
    starts = {phase.phase: phase.start for phase in phases}
    for phase, step, words in read_marks(run_dir):
        if phase in starts:
            place = starts[phase] + step
            axes.axvline(place, color="#CC79A7", ls=":", lw=1.2)
            axes.annotate(words, (place, 0.02), xycoords=("data", "axes fraction"), rotation=90, fontsize=8)


def _name_phases(axes: Any, phases: list[PhaseCurves]) -> None:
    """Write the names of phases above their parts of the axis; in two rows where neighbours would touch."""
    total = max(1, sum(phase.steps for phase in phases))
    axes.set_xlim(-0.01 * total, 1.01 * total)
    is_narrow = any(phase.steps / total < 0.013 * len(phase.phase) for phase in phases) and len(phases) > 1
    for index, phase in enumerate(phases):
        place = min(phase.start + 0.004 * total, 0.99 * total)
        row = index % 3 if is_narrow else 0
        axes.annotate(
            phase.phase,
            (place, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4 + 13 * row),
            textcoords="offset points",
            fontsize=9,
            ha="right" if phase.start > 0.85 * total else "left",
            annotation_clip=False,
        )


SLOTS_FILE = "memory_slots.png"
LINES = {
    "memory_utilization": ("utilisation", "#0072B2"),
    "memory_dead_share": ("dead slots", "#D55E00"),
    "memory_mass": ("probability of slots", "#009E73"),
    "memory_write_rate": ("write rate", "#555555"),
}


def read_statistics(run_dir: Path) -> tuple[dict[str, list[tuple[int, float]]], list[list[float]]]:
    """Return shares by metric and step of the run, and the last read mass per slot by layer and head."""
    shares: dict[str, dict[tuple[str, int], float]] = {key: {} for key in LINES}
    last: list[list[float]] = []
    for event in read_events(run_dir):
        if event["event"] == MEMORY_SLOTS:
            last = [head for heads in event["read_mass"].values() for head in heads]
        elif event["event"] == "metrics":
            for key in shares.keys() & event["values"].keys():
                shares[key][event["phase"], event["step"]] = float(event["values"][key])
    starts = {curves.phase: curves.start for curves in read_curves(run_dir)} if last else {}
    lines = {
        key: sorted((starts[phase] + step, value) for (phase, step), value in found.items())
        for key, found in shares.items()
    }
    return lines, last


def draw_memory_slots(run_dir: Path, labels: dict[str, str]) -> Picture | None:
    """Return the statistics of a run, None where no memory slots were measured."""
    lines, read_mass = read_statistics(run_dir)
    if not read_mass:
        return None
    with styled():
        figure = new_figure(8.0, 5.6)
        above, below = figure.subplots(2, 1, height_ratios=[2.4, 2.0])
        for key, (label, colour) in LINES.items():
            if lines[key]:
                above.plot(*zip(*lines[key], strict=True), color=colour, marker="o", markersize=4, label=label)
        above.set_ylim(-0.03, 1.03)
        above.set_xlabel("step of the run")
        above.set_ylabel("share")
        label_ticks(above.xaxis, short_number)
        above.grid(visible=True, color=FAINT)
        above.legend(loc="best")
        for head in read_mass:
            below.plot(sorted(head, reverse=True), color="#0072B2", alpha=0.5, lw=1.2, marker=".")
        below.set_xlabel("slot of a key/value head, by what is read of it")
        below.set_ylabel("probability per query")
        label_ticks(below.yaxis, short_number)
        below.grid(visible=True, color=FAINT)
        return to_picture(figure, labels)
