"""optimizers.png: training loss of each optimiser by tokens and by time, with switches marked; and the table's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caramba.artifacts.key import MetricKey
from caramba.artifacts.report import Omission
from caramba.artifacts.rows import collect_measured_rows, omit_if_asked
from caramba.artifacts.style import Picture, label_ticks, new_figure, short_number, styled, to_picture
from caramba.result import RunResult

KIND, OPTIMIZERS_FILE = "optimizers", "optimizers.png"
OPTIMIZERS_HEAD = (
    *("Optimiser", "lr", "Held-out loss (nats)", "Deviation", "Against AdamW, equal tokens (95%)"),
    *("Against AdamW, equal time (95%)", "Against the best fixed, equal tokens (95%)"),
    *("Against the best fixed, equal time (95%)", "Seconds", "Trials (tokens)"),
)
COLOURS = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999")


def optimizer_rows(result: RunResult) -> list[tuple[dict[str, Any], list[str]]]:
    """Return each measured row with the keys of lr, val_loss, val_loss_deviation and seconds."""
    found: list[tuple[dict[str, Any], list[str]]] = []
    for row in collect_measured_rows(result, KIND):
        given = {"row": row["row"]}
        fields = ("lr", "val_loss", "val_loss_deviation", "seconds")
        found.append((row, [MetricKey(KIND, row["model"], field, given).format() for field in fields]))
    return found


def interval_text(interval: dict[str, float] | None) -> str:
    """Return the ends of an interval of differences."""
    if interval is None or interval["low"] == interval["high"] == 0.0:
        return "-"
    return f"{interval['low']:+.4f} to {interval['high']:+.4f}"


def interval_cells(row: dict[str, Any]) -> list[str]:
    """Return a row's intervals at equal tokens and time: against AdamW, then against the best fixed row."""
    fixed, timed = (
        interval_text(row.get(key)) for key in ("best_fixed_difference", "best_fixed_difference_at_equal_time")
    )
    if "best_fixed" in row:
        fixed = f"{row['best_fixed']}: {fixed}"
    return [
        interval_text(row["loss_difference"]),
        interval_text(row.get("loss_difference_at_equal_time")),
        fixed,
        timed,
    ]


def time_omissions(result: RunResult) -> list[Omission]:
    """Return the comparisons at equal time that there was no time for."""
    return [
        Omission(f"{KIND}: {row['row']}, equal time", str(row["equal_time_skipped"]))
        for row in collect_measured_rows(result, KIND)
        if "equal_time_skipped" in row
    ]


def draw_optimizers(result: RunResult) -> tuple[Picture | None, list[Omission]]:
    """Return the curves of every row's first seed; nothing where no table was asked for."""
    rows = collect_measured_rows(result, KIND)
    if not rows:
        return None, omit_if_asked(result, KIND, OPTIMIZERS_FILE)
    return draw_rows(rows, result.labels), time_omissions(result)


def draw_rows(rows: Sequence[dict[str, Any]], labels: dict[str, str]) -> Picture:
    """Return the curves of the first seed of rows that were measured."""
    with styled():
        figure = new_figure(10.0, 4.2)
        panels = figure.subplots(1, 2, sharey=True)
        for row, colour in zip(rows, COLOURS, strict=False):
            run = row["runs"][0]
            for axes, key in zip(panels, ("tokens", "seconds"), strict=True):
                points = [(point[key], point["loss"]) for point in run["curve"]]
                axes.plot(*zip(*points, strict=True), color=colour, lw=1.5, label=row["row"])
                for at, loss in _switches(run, key):
                    axes.plot([at], [loss], marker="v", markersize=8, color=colour)
        for axes, name in zip(panels, ("tokens of the run's own steps", "seconds"), strict=True):
            axes.locator_params(axis="x", nbins=5)
            label_ticks(axes.xaxis, short_number)
            axes.set_xlabel(name)
        panels[0].set_ylabel("training loss (lower is better)")
        panels[0].set_title("Optimisers; triangles are switches", loc="left")
        panels[1].legend(loc="upper right")
        return to_picture(figure, labels)


def _switches(run: dict[str, Any], key: str) -> list[tuple[float, float]]:
    """Return where a run switched: the point of its curve nearest after the decision."""
    curve = run["curve"]
    per_step = run["tokens"] / max(1, run["steps"] + run["trial_steps"])
    steps = [
        one["step"]
        for one in run["decisions"]
        if "safety" not in one and one["choice"] != one.get("strategy", one["choice"])
    ]
    found: list[tuple[float, float]] = []
    for step in steps:
        point = next((point for point in curve if point["tokens"] >= step * per_step), curve[-1])
        found.append((point[key], point["loss"]))
    return found
