"""training.png: tokens/s of every side of every part of training.json, with the middle 60% of its turns."""

from __future__ import annotations

from typing import Any

from caramba.artifacts.style import label_ticks, new_figure, short_number, styled, to_png

COLOURS = {
    "caramba": "#0072B2",
    "transformers": "#D55E00",
    "transformers, our attention backend": "#E69F00",
    "bare loop": "#009E73",
    "our model bare": "#999999",
}
OTHERS = ("#56B4E9", "#CC79A7", "#F0E442", "#000000")
"""Of sides that have no colour of their own, as recipes of float8, in turn."""


def draw_training(data: dict[str, Any]) -> bytes | None:
    """Return the bars as PNG; nothing where no part has sides."""
    parts = {name: part for name, part in data["parts"].items() if "rows" in part}
    if not parts:
        return None
    places = sum(len(part["rows"]) + 1 for part in parts.values())
    with styled():
        figure = new_figure(9.0, 1.2 + 0.28 * places)
        axes = figure.subplots(1, 1)
        at, ticks, named = 0, [], set[str]()
        others = [side for part in parts.values() for side in part["rows"] if side not in COLOURS]
        colours = COLOURS | {side: OTHERS[at % len(OTHERS)] for at, side in enumerate(dict.fromkeys(others))}
        for name, part in parts.items():
            first = at
            for side, row in part["rows"].items():
                rate = row["tokens_per_s"]
                spread = [[max(0.0, rate - row["p20"])], [max(0.0, row["p80"] - rate)]]
                label = None if side in named else side
                named.add(side)
                axes.barh(at, rate, height=0.85, color=colours[side], label=label, xerr=spread)
                mfu = "" if row["mfu"] is None else f" ({row['mfu']:.1%} MFU)"
                axes.annotate(
                    f"{short_number(rate)}{mfu}",
                    (max(rate, row["p80"]), at),
                    xytext=(5, -3),
                    textcoords="offset points",
                    fontsize=8,
                )
                at += 1
            ticks.append(((first + at - 1) / 2, name))
            at += 1
        axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
        axes.invert_yaxis()
        axes.set_xlim(0, 1.3 * max(row["p80"] for part in parts.values() for row in part["rows"].values()))
        axes.set_xlabel("tokens/s, median and middle 60% of turns (right is faster)")
        axes.set_title(f"Training steps of {data['model']} on {data['machine']['name']}", loc="left")
        axes.grid(visible=False, axis="y")
        label_ticks(axes.xaxis, short_number)
        figure.legend(loc="outside lower center", ncols=3)
        return to_png(figure, {})
