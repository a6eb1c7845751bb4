"""controls.png: perplexity ratio against KV ratio, of the student and of what else the same teacher gives."""

from __future__ import annotations

from typing import Any

from caramba.artifacts.report import Omission
from caramba.artifacts.rows import collect_measured_rows
from caramba.artifacts.style import (
    COLOURS,
    OTHER_COLOUR,
    Picture,
    label_ticks,
    log10_axis,
    name_of,
    new_figure,
    short_number,
    styled,
    to_picture,
)
from caramba.result import RunResult

KIND, CONTROLS_FILE = "controls", "controls.png"
_LINE = 12.0  # points between two names
_WIDE = 3.0  # above this spread a linear axis hides the good rows


def collect_skipped_controls(result: RunResult) -> list[Omission]:
    """Return the controls that could not be made, with the reason."""
    return [
        Omission(f"controls: {row['model']}", str(row["skipped"]))
        for bench in result.benchmarks
        if bench.type == KIND
        for row in bench.rows
        if row.get("skipped") is not None
    ]


def draw_controls(result: RunResult) -> Picture | None:
    """Return one point per row with its 95% interval, or None when there is none."""
    rows = collect_measured_rows(result, KIND)
    if not rows:
        return None
    with styled():
        figure = new_figure(8.5, 5.0)
        axes = figure.subplots(1, 1)
        for row in rows:
            x, y, name = row["kv_ratio"], row["ppl_ratio"], row["model"]
            low, high = row["ppl_ratio_low"], row["ppl_ratio_high"]
            error = None if low is None else [[y - low], [high - y]]
            is_ours = name.startswith("student") or name == "teacher"
            axes.errorbar(
                [x],
                [y],
                yerr=error,
                marker="o" if is_ours else "s",
                markerfacecolor="white" if row["tokens"] == 0 else COLOURS.get(name, OTHER_COLOUR),
                color=COLOURS.get(name, OTHER_COLOUR),
                linestyle="none",
                capsize=3,
            )
        values = [row["ppl_ratio"] for row in rows]
        if max(values) / min(values) > _WIDE:
            log10_axis(axes)
        axes.set_xlim(left=0.8 * min(row["kv_ratio"] for row in rows), right=1.35 * max(r["kv_ratio"] for r in rows))
        label_ticks(axes.yaxis, short_number)
        _name_points(axes, rows)
        axes.set_xlabel("KV ratio: 16-bit teacher's bytes per token over the row's (right is smaller)")
        axes.set_ylabel("perplexity over the teacher's (lower is better)")
        axes.set_title("Controls at matched bytes; hollow: not trained further", loc="left")
        return to_picture(figure, result.labels)


def _name_points(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Write each row's name next to its point; names of one column do not overlap."""
    axes.figure.draw_without_rendering()  # settles the layout, so that places are known
    to_points = 72 / axes.figure.dpi
    columns: dict[int, float] = {}
    for row in sorted(rows, key=lambda item: item["ppl_ratio"]):
        at: Any = axes.transData.transform((row["kv_ratio"], row["ppl_ratio"]))
        column, height = float(at[0]), float(at[1]) * to_points
        place = max(height, columns.get(round(column), float("-inf")) + _LINE)
        columns[round(column)] = place
        axes.annotate(
            name_of(row["model"]),
            (row["kv_ratio"], row["ppl_ratio"]),
            xytext=(8, place - height - 3),
            textcoords="offset points",
            fontsize=9,
        )
