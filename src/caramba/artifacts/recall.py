"""recall.png: what is recalled behind the window, by pairs, by bytes of the cache, and by length of the context;
far_back.png: keys found in held-out text by depth, and perplexity by position."""

from __future__ import annotations

import re
from typing import Any

from caramba.artifacts.key import Condition, parse_key
from caramba.artifacts.style import (
    COLOURS,
    Picture,
    byte_text,
    label_ticks,
    log2_axis,
    name_of,
    new_figure,
    styled,
    to_picture,
    whole_number,
)
from caramba.result import Metric, RunResult

RECALL_FILE, FAR_BACK_FILE = "recall.png", "far_back.png"
ATTENTION_COLOURS = {
    "memory": "#D55E00",
    "window": "#56B4E9",
    "window_equal_bytes": "#0072B2",
    "full": "#009E73",
}
Measured = tuple[str, dict[str, Condition], dict[str, Metric]]


def list_recall(metrics: dict[str, Metric], *, has_length: bool) -> list[Measured]:
    """Return (model, conditions, metrics by field) of the recall benchmarks; `has_length`: those at other lengths."""
    found: dict[tuple[str, str], Measured] = {}
    for metric in metrics.values():
        key = parse_key(metric.key)
        if key.family == "recall" and ("length" in key.conditions) == has_length:
            at = (str(key.model), metric.key.partition("@")[2])
            found.setdefault(at, (at[0], dict(key.conditions), {}))[2][key.field] = metric
    return list(found.values())


def draw_recall(result: RunResult, metrics: dict[str, Metric]) -> Picture | None:
    """Return recall by pairs and by bytes, and by length where that was measured; None without the benchmark."""
    near, far = (list_recall(metrics, has_length=has_length) for has_length in (False, True))
    if not near:
        return None
    with styled():
        figure = new_figure(13.0 if far else 9.0, 3.8)
        by_pairs, by_bytes, *more = figure.subplots(1, 3 if far else 2, sharey=True)
        _draw(by_pairs, near, "pairs", "pairs")
        _draw(by_bytes, near, None, "cache of a row")
        label_ticks(by_bytes.xaxis, byte_text)
        if more:
            _draw(more[0], far, "length", "tokens after the pairs")
        by_pairs.set_ylim(-0.03, 1.03)
        by_pairs.set_ylabel("share of values recalled")
        for axes in (by_pairs, *more):
            axes.legend(loc="best", fontsize=8)
        return to_picture(figure, result.labels)


def draw_far_back(result: RunResult, metrics: dict[str, Metric]) -> Picture | None:
    """Return the shares of keys found by depth, and perplexity by position; None where neither was measured."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {"depth": {}, "from": {}}
    for metric in metrics.values():
        key = parse_key(metric.key)
        along = next((name for name in found if name in key.conditions), None)
        if key.family == "long_context" and along is not None and not key.field.endswith("nll"):
            what = "" if along == "from" else f", {key.field} in {key.conditions['length']:,} tokens"
            lines = found[along].setdefault(f"{name_of(str(key.model))}{what}", [])
            lines.append((int(key.conditions[along]), metric.value))
    if not any(found.values()):
        return None
    with styled():
        figure = new_figure(11.0, 3.8)
        labels = (
            ("depth of the key (percent of the row)", "share of answers found"),
            ("first position of the range (tokens)", "perplexity"),
        )
        for axes, lines, (x, y) in zip(figure.subplots(1, 2), found.values(), labels, strict=True):
            for name, points in lines.items():
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
            axes.set_xlabel(x)
            axes.set_ylabel(y)
            if lines:
                axes.legend(loc="best", fontsize=8)
        return to_picture(figure, result.labels)


def _draw(axes: Any, found: list[Measured], along: str | None, label: str) -> None:
    """Draw a line for each attention and its sizes over a condition, or over bytes."""
    lines: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for model, conditions, fields in found:
        x = fields["cache_bytes"].value if along is None else conditions[along]
        split = [f"{name} {conditions[name]}" for name in ("ratio", "slots") if name in conditions]
        named = " ".join([str(conditions["attention"]).replace("_", " "), *(split if along == "pairs" else split[:1])])
        lines.setdefault((model, named), []).append((float(x), fields["recall"].value))
    for index, ((_, named), points) in enumerate(lines.items()):
        colour = next(
            colour for kind, colour in reversed(ATTENTION_COLOURS.items()) if named.startswith(kind.replace("_", " "))
        )
        style = {"color": colour, "ls": "" if along is None else ("-", "--", ":")[index % 3], "marker": "o"}
        axes.plot(*zip(*sorted(points), strict=True), label=named, **style)
    xs = sorted({round(x) for points in lines.values() for x, _ in points})
    if along == "pairs":
        axes.set_xticks(xs)
        label_ticks(axes.xaxis, whole_number)
    else:
        log2_axis(axes, xs)
    axes.set_xlabel(label)


POSITION_FILE = "by_position.png"
_CHECK = re.compile(r"ppl_ratio_at_(\d+)_(\d+)")


def list_ratios(result: RunResult) -> list[tuple[int, int, float]]:
    """Return (first position, last position, ratio) of the last fidelity verdict, in order of position."""
    for verdict in reversed(result.verdicts):
        if verdict.type == "fidelity":
            found = [(_CHECK.fullmatch(check.name), check.value) for check in verdict.checks]
            return sorted((int(match[1]), int(match[2]), value) for match, value in found if match is not None)
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
