"""scaling.png: tokens/s against devices by strategy, with one device times their number and the must."""

from __future__ import annotations

from typing import Any

from merge_runs import sitting_of
from sections.scaling import settings_of, share_of_linear

from caramba.artifacts.style import label_ticks, new_figure, short_number, styled, to_png, whole_number

COLOURS = {"single": "#000000", "ddp": "#0072B2", "fsdp2": "#D55E00"}
MARKERS = "osD^v"
"""By settings, in turn."""


def draw_scaling(data: dict[str, Any]) -> bytes | None:
    """Return the curves as PNG; nothing where no row has a base of its sitting on several devices.

    Tokens/s of a row on the left; on the right its share of linear, which is of one device in the same sitting.
    """
    rows = [row for row in data["rows"] if share_of_linear(data, row) is not None]
    if all(row["devices"] == 1 for row in rows):
        return None
    counts = sorted({row["devices"] for row in rows})
    base = max(row["tokens_per_s"] for row in rows if row["strategy"] == "single")
    curves: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["devices"]):
        if row["strategy"] != "single":
            curves.setdefault((row["strategy"], settings_of(row), sitting_of(row)), []).append(row)
    with styled():
        figure = new_figure(10.0, 4.6)
        speeds, shares = figure.subplots(1, 2)
        line = {"color": "#888888", "linewidth": 1.2, "linestyle": "--"}
        speeds.plot(counts, [base * count for count in counts], label="linear (fastest single)", **line)
        shares.plot(counts, [1.0] * len(counts), **line)
        settings = list(dict.fromkeys(words for _, words, _ in curves))
        for (strategy, words, sitting), found in curves.items():
            # One device is of every curve, whether its strategy ran there or not: it is what linear is of.
            alone = {} if found[0]["devices"] == 1 else _alone(data, sitting)
            at = {
                **alone,
                **{row["devices"]: (row["tokens_per_s"], share_of_linear(data, row)) for row in found},
            }
            name = strategy + ("" if words == "default settings" else f", {words}")
            style = {
                "color": COLOURS.get(strategy, "#009E73"),
                "marker": MARKERS[settings.index(words) % len(MARKERS)],
                "label": f"{name} ({sitting})" if sitting else name,
            }
            for axes, index in ((speeds, 0), (shares, 1)):
                axes.plot(list(at), [pair[index] for pair in at.values()], **style)
        for strategy in dict.fromkeys(strategy for strategy, _, _ in curves):
            if (must := data["must"].get(strategy)) is not None:
                shares.axhline(must, color=COLOURS.get(strategy, "#009E73"), linewidth=1.2, linestyle=":")
                shares.annotate(  # next to the axes, where no curve is
                    f"{strategy} must {must:.0%}",
                    (1.0, must),
                    xycoords=("axes fraction", "data"),
                    xytext=(4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=9,
                    color=COLOURS.get(strategy, "#009E73"),
                )
        speeds.set_ylim(0)
        speeds.set_title(f"Tokens/s, {data['batch']} x {data['block']:,} a device", loc="left")
        label_ticks(speeds.yaxis, short_number)
        lowest = min(share_of_linear(data, row) or 0.0 for row in rows)
        shares.set_ylim(min(0.85, lowest - 0.02), 1.01)
        shares.set_title("Share of linear, in one sitting", loc="left")
        label_ticks(shares.yaxis, lambda value: f"{value:.0%}")
        for axes in (speeds, shares):
            axes.set_xticks(counts)
            label_ticks(axes.xaxis, whole_number)
            axes.set_xlabel(f"devices ({data['machine']['device']})")
        figure.legend(*speeds.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        return to_png(figure, {})


def _alone(data: dict[str, Any], sitting: str) -> dict[int, tuple[float, float]]:
    rows = [row for row in data["rows"] if row["strategy"] == "single" and sitting_of(row) == sitting]
    return {1: (rows[0]["tokens_per_s"], 1.0)}
