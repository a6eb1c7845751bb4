"""memory_slots.png: how memory slots were used over the run, and what is read of each slot at its end."""

from __future__ import annotations

from pathlib import Path

from caramba.artifacts.style import FAINT, Picture, label_ticks, new_figure, short_number, styled, to_picture
from caramba.artifacts.training_curves import read_curves
from caramba.runs.events import MEMORY_SLOTS, read_events

PLOT_FILE = "memory_slots.png"
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
                above.plot(
                    *zip(*lines[key], strict=True), color=colour, marker="o", markersize=4, label=label
                )
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
