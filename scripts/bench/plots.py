"""The plots next to the JSON files in docs/benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from verdicts import memory_bound, read_bandwidth_of

from caramba.artifacts.style import label_ticks, new_figure, short_number, styled, to_png

TICKS = 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10  # TB/s
SIDE_COLOURS = {
    "caramba": "#0072B2",
    "transformers": "#D55E00",
    "transformers, our attention backend": "#E69F00",
    "bare loop": "#009E73",
    "our model bare": "#999999",
}
OTHERS = ("#56B4E9", "#CC79A7", "#F0E442", "#000000")
"""Of sides that have no colour of their own, as recipes of float8, in turn."""
POSITIONS = "0_15", "16_63", "64_127", "128_255", "256_511", "512_1023", "1024_2047"
MARKERS = "osD^v"
"""By settings, in turn."""


def draw_decode(data: dict[str, Any]) -> bytes:
    """Return bytes per second over bytes read as PNG: a colour a format, a marker a layout, the roof."""
    with styled():
        figure = new_figure(7.0, 4.5)
        axes = figure.subplots(1, 1)
        layouts = list(dict.fromkeys(row["layout"] for row in data["rows"]))
        formats = list(dict.fromkeys(row["format"] for row in data["rows"]))
        for (i, layout), (j, form) in itertools.product(enumerate(layouts), enumerate(formats)):
            rows = [row for row in data["rows"] if (row["layout"], row["format"]) == (layout, form)]
            xs = [row["useful_bytes"] / 1e6 for row in rows]
            ys = [row["useful_bytes"] / row["median_us"] / 1e6 for row in rows]
            axes.scatter(xs, ys, marker="os^D"[i % 4], color=f"C{j}", label=f"{layout}, {form}")
        if data["read_roof_bytes_per_s"]:
            axes.axhline(read_bandwidth_of(data) / 1e12, color="black", linestyle="--", label="read roof")
        axes.set(xscale="log", yscale="log", xlabel="MB read", ylabel="TB/s")
        low, high = axes.get_ylim()
        axes.set_yticks([x for x in TICKS if low <= x <= high])
        axes.yaxis.set_minor_formatter("")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
        axes.legend(fontsize=6, ncols=2)
        return to_png(figure, {})


def draw_inference(data: dict[str, Any]) -> bytes | None:
    """Return tokens per second over context as PNG, of teacher and student with the memory bound of each."""
    rows_of = {
        side: sorted(
            (row for row in data["rows"] if row["part"] == "context" and row["side"] == side),
            key=lambda row: row["context"],
        )
        for side in ("teacher", "student")
    }
    if not any(rows_of.values()):
        return None
    with styled():
        figure = new_figure(7.0, 4.5)
        axes = figure.subplots(1, 1)
        for (side, rows), colour in zip(rows_of.items(), ("#0072B2", "#D55E00"), strict=True):
            xs, ys = [row["context"] for row in rows], [row["tok_s"] for row in rows]
            errors = [
                [row["tok_s"] - row["p20"] for row in rows],
                [row["p80"] - row["tok_s"] for row in rows],
            ]
            axes.errorbar(xs, ys, yerr=errors, marker="o", color=colour, capsize=3, label=side)
            limits = [memory_bound(row, data["read_bytes_per_s"]) for row in rows]
            axes.plot(xs, limits, color=colour, linestyle="--", linewidth=1, label=f"{side}, memory bound")
        axes.set_xscale("log", base=2)
        axes.set(xlabel="tokens of context", ylabel="tokens/s, batch 1")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        return to_png(figure, {})


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
        others = [side for part in parts.values() for side in part["rows"] if side not in SIDE_COLOURS]
        colours = SIDE_COLOURS | {side: OTHERS[at % len(OTHERS)] for at, side in enumerate(dict.fromkeys(others))}
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
        axes.set_title(
            f"Training steps of {data['model']} on {data['machine'].get('name', data['machine']['device'])}",
            loc="left",
        )
        axes.grid(visible=False, axis="y")
        label_ticks(axes.xaxis, short_number)
        figure.legend(loc="outside lower center", ncols=3)
        return to_png(figure, {})


def draw_kernels(data: dict[str, Any]) -> bytes:
    """Return each row's share of a copy's bandwidth by side as PNG, with what it must reach."""
    rows = data["rows"]
    with styled():
        figure = new_figure(8.0, 0.42 * len(rows) + 1.4)
        axes = figure.subplots(1, 1)
        colours = {"ours": "#0072b2", "eager": "#999999", "compiled": "#e69f00"}
        for at, (side, colour) in enumerate(colours.items()):
            shown = [
                (y + 0.27 * (at - 1), 100 * row["sides"][side]["of_copy"])
                for y, row in enumerate(rows)
                if side in row["sides"]
            ]
            if shown:
                axes.barh(*zip(*shown, strict=True), height=0.25, color=colour, label=side)
        for y, row in enumerate(rows):
            axes.plot([100 * row["must"]] * 2, [y - 0.42, y + 0.42], color="black", linewidth=1)
        axes.axvline(100, color="#d55e00", linestyle="--", linewidth=1, label="roof: a copy")
        axes.set_yticks(range(len(rows)), [f"{row['name']}, {row['pass']}" for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlabel(f"useful bytes a second, % of a copy's, on {data['machine']['device']} (black: must)")
        figure.legend(loc="outside lower center", ncols=4)
        return to_png(figure, {})


def draw_smollm2(data: dict[str, Any]) -> bytes:
    """Return the students of the real teacher as PNG: task points lost over compression, and perplexity by position.

    Both are against the teacher trained further on the students' tokens; bars are 95% intervals.
    """
    with styled():
        figure = new_figure(10.0, 4.4)
        tasks, text = figure.subplots(1, 2)
        objectives = dict.fromkeys(row["objective"] for row in data["students"] if "tasks" in row)
        for objective, colour, marker in zip(objectives, SIDE_COLOURS.values(), MARKERS, strict=False):
            rows = [row for row in data["students"] if row["objective"] == objective and "tasks" in row]
            found = [row["tasks_against_control"]["mean_six_full"] for row in rows]
            label = f"{objective}, {rows[0]['tokens'] / 1e6:.1f}M tokens"
            xs = [row["bytes_ratio"] for row in rows]
            _draw_intervals(tasks, xs, found, "points", color=colour, marker=marker, label=label)
        drops = {float(name.rstrip("x")): drop for name, drop in data["published"]["drops"].items()}
        tasks.plot(list(drops), list(drops.values()), "k--D", label="MHA2MLA, published, 2.25B tokens")
        tasks.axhline(0, color="black", linewidth=0.8)
        tasks.set_ylim(bottom=1.45 * min(drops.values()))  # room for the legend
        tasks.set(xlabel="fewer bytes a token (right is smaller)", ylabel="points, mean of six tasks")
        tasks.set_title("Six tasks, less the continued control", loc="left")
        label_ticks(tasks.xaxis, "{:g}x".format)
        for row, colour in zip(
            (row for row in data["students"] if row["objective"] == "KL, from the control"),
            SIDE_COLOURS.values(),
            strict=False,
        ):
            found = [row["text_against_control"][f"heldout_at_{place}"] for place in POSITIONS]
            label = f"{row['bytes_ratio']}x"
            _draw_intervals(text, range(len(found)), found, "ratio", color=colour, marker="o", label=label)
        text.axhline(1, color="black", linewidth=0.8)
        text.set_xticks(range(len(POSITIONS)), [place.replace("_", "-") for place in POSITIONS], rotation=30)
        text.set(xlabel="position in windows of 2,048 tokens", ylabel="perplexity over the control's")
        text.set_title("Held-out encyclopedia, KL from the control", loc="left")
        tasks.legend(fontsize=9)
        text.legend(fontsize=9)
        return to_png(figure, {})


def draw_memory(data: dict[str, Any], recall: dict[str, Any]) -> bytes:
    """Return memory slots as PNG: a layer's bytes and the time of a token by context, and recall by pairs."""
    colours = {"memory": SIDE_COLOURS["caramba"], "full": SIDE_COLOURS["transformers"], "window": "#999999"}
    names = {"memory": "memory slots", "full": "full attention", "window": "window alone"}
    with styled():
        figure = new_figure(11.0, 3.8)
        size, decode, pairs = figure.subplots(1, 3)
        states = [row for row in data["rows"] if row["case"] == "state"]
        steps = [row for row in data["rows"] if row["case"] == "decode" and row["side"].endswith("_graph")]
        for side, key in (("memory", "bytes_per_layer"), ("full", "full_bytes_per_layer")):
            style: dict[str, Any] = {"color": colours[side], "marker": "o", "label": names[side]}
            size.plot([row["tokens"] for row in states], [row[key] / 1e6 for row in states], **style)
            rows = [row for row in steps if row["side"] == f"{side}_graph"]
            decode.plot([row["context"] for row in rows], [row["ms_per_token"] for row in rows], **style)
        for axes, title in ((size, "MB of a layer and sequence"), (decode, "ms a token, 16 rows, CUDA graph")):
            axes.set_xscale("log", base=2)
            axes.set_xticks([row["tokens"] for row in states][: None if axes is size else -1])
            axes.minorticks_off()
            axes.set(xlabel="tokens of context")
            axes.set_title(title, loc="left")
            label_ticks(axes.xaxis, short_number)
        size.set_yscale("log")
        decode.set_ylim(bottom=0)
        for side, label in names.items():
            found = [row for row in recall["rows"] if row["attention"] == side]
            pairs.plot(
                [row["pairs"] for row in found],
                [row["recall"] for row in found],
                color=colours[side],
                marker="o",
                linestyle="",
                label=label,
            )
        pairs.axhline(recall["chance"], color="black", linestyle="--", linewidth=0.8, label="chance")
        pairs.set(xlabel="pairs", ylim=(0, 1.05), xlim=(2, 10))
        pairs.set_xticks(sorted({row["pairs"] for row in recall["rows"]}))
        pairs.set_title("Recall behind 16 windows", loc="left")
        pairs.legend(fontsize=9, loc="center")
        size.legend(fontsize=9)
        return to_png(figure, {})


def _draw_intervals(axes: Any, xs: Sequence[float], found: list[dict[str, Any]], key: str, **style: Any) -> None:
    """Draw a line of values with their 95% intervals."""
    bars = [[abs(item["interval_95"][side] - item[key]) for item in found] for side in (0, 1)]
    axes.errorbar(xs, [item[key] for item in found], yerr=bars, capsize=3, **style)
