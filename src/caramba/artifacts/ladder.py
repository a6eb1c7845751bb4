"""inference_ladder.png: decode throughput rung by rung; and the rows of comparisons that state their own ratios."""

from __future__ import annotations

from typing import Any

from caramba.artifacts.report import Omission
from caramba.artifacts.rows import missing_reason
from caramba.artifacts.style import (
    Picture,
    colour_of,
    label_ticks,
    name_of,
    new_figure,
    short_number,
    styled,
    to_picture,
)
from caramba.result import RunResult

KIND, PLOT_FILE = "inference_ladder", "inference_ladder.png"
SKIPPING = {KIND: "rung", "weights": "weights", "ladder": "row"}
"""Benchmarks whose rows may have a reason for no measurement, with the column that separates a model's rows."""


def collect_measured_rows(result: RunResult, kind: str) -> list[dict[str, Any]]:
    """Return the measured rows of the benchmarks of a type, in order."""
    return [
        row
        for bench in result.benchmarks
        if bench.type == kind
        for row in bench.rows
        if row.get("skipped") is None
    ]


def collect_skipped_rows(result: RunResult) -> list[Omission]:
    """Return the rungs and formats that could not be measured, with the reason."""
    return [
        Omission(f"{bench.id}: {row['model']}, {row[SKIPPING[bench.type]]}", str(row["skipped"]))
        for bench in result.benchmarks
        if bench.type in SKIPPING
        for row in bench.rows
        if row.get("skipped") is not None
    ]


def draw_ladder(result: RunResult) -> tuple[Picture | None, list[Omission]]:
    """Return a bar per model and rung with its middle 60%; nothing where no ladder was asked for."""
    rows = collect_measured_rows(result, KIND)
    if not rows:
        asked = any(bench.type == KIND for bench in result.benchmarks)
        return None, [Omission(PLOT_FILE, missing_reason(result, KIND))] if asked else []
    rungs = list(dict.fromkeys(str(row["what"]) for row in rows))
    models = list(dict.fromkeys(str(row["model"]) for row in rows))
    height = 0.8 / len(models)
    with styled():
        figure = new_figure(8.5, 1.6 + 0.7 * len(rungs))
        axes = figure.subplots(1, 1)
        for index, model in enumerate(models):
            own = [row for row in rows if row["model"] == model]
            places = [rungs.index(str(row["what"])) + (index - (len(models) - 1) / 2) * height for row in own]
            values = [float(row["tok_s"]) for row in own]
            below = [max(0.0, value - row["tok_s_p20"]) for value, row in zip(values, own, strict=True)]
            above = [max(0.0, row["tok_s_p80"] - value) for value, row in zip(values, own, strict=True)]
            axes.barh(places, values, height=0.92 * height, color=colour_of(model), label=name_of(model))
            axes.errorbar(
                values, places, xerr=[below, above], fmt="none", ecolor="#222222", capsize=3, elinewidth=1.2
            )
            for place, value, row in zip(places, values, own, strict=True):
                note = {"xytext": (6, -4), "textcoords": "offset points", "fontsize": 9}
                end = max(value, float(row["tok_s_p80"]))
                axes.annotate(f"{short_number(value)} ({row['speed_up']:.2f}x)", (end, place), **note)
        axes.set_yticks(range(len(rungs)), rungs)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.25 * max(float(row["tok_s_p80"]) for row in rows))
        label_ticks(axes.xaxis, short_number)
        axes.set_xlabel("tokens/s of decode, median and middle 60% (right is faster)")
        axes.set_title("Inference ladder", loc="left")
        axes.grid(visible=False, axis="y")
        if len(models) > 1:
            axes.legend(loc="lower right")
        return to_picture(figure, result.labels), []
