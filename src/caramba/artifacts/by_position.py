"""by_position.png: the perplexity ratio of student and teacher by position in the window."""

from __future__ import annotations

import re

from caramba.artifacts.style import COLOURS, Picture, label_ticks, new_figure, styled, to_picture
from caramba.result import RunResult

PLOT_FILE = "by_position.png"
_CHECK = re.compile(r"ppl_ratio_at_(\d+)_(\d+)")


def list_ratios(result: RunResult) -> list[tuple[int, int, float]]:
    """Return (first position, last position, ratio) of the last fidelity verdict, in order of position."""
    for verdict in reversed(result.verdicts):
        if verdict.type == "fidelity":
            found = [(_CHECK.fullmatch(check.name), check.value) for check in verdict.checks]
            return sorted(
                (int(match[1]), int(match[2]), value) for match, value in found if match is not None
            )
    return []


def draw_by_position(result: RunResult) -> Picture | None:
    """Return the ratio over ranges of positions, or None where fidelity was not measured by position."""
    ratios = list_ratios(result)
    if len(ratios) < 2:
        return None
    with styled():
        figure = new_figure(7.5, 3.6)
        axes = figure.subplots()
        places = range(len(ratios))
        axes.plot(places, [ratio for *_, ratio in ratios], marker="o", color=COLOURS["student"])
        axes.axhline(1.0, color=COLOURS["teacher"], ls="--", lw=1.4, label="teacher")
        axes.set_xticks(list(places), [f"{low:,} to {high:,}" for low, high, _ in ratios])
        axes.set_xlabel("position in the window (tokens)")
        axes.set_ylabel("perplexity over the teacher's")
        label_ticks(axes.yaxis, lambda value: f"{value:.4g}")
        axes.set_xlim(-0.3, len(ratios) - 0.7)
        for place, (*_, ratio) in zip(places, ratios, strict=True):
            above = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": 9}
            axes.annotate(f"{ratio:.4g}", (place, ratio), **above)
        axes.margins(y=0.25)
        axes.legend(loc="best")
        return to_picture(figure, result.labels)
