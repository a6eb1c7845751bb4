"""summary.png: perplexity of every stage, throughput, and KV bytes per token, side by side."""

from __future__ import annotations

import textwrap
from typing import Any

from caramba.artifacts.key import parse_key
from caramba.artifacts.metrics import STAGES, STUDENT, TEACHER, describe, has_standard_error, headline
from caramba.artifacts.report import Omission
from caramba.artifacts.rows import missing_reason
from caramba.artifacts.style import (
    FAINT,
    Picture,
    colour_of,
    label_ticks,
    log10_axis,
    name_of,
    new_figure,
    short_number,
    styled,
    to_picture,
)
from caramba.result import Metric, RunResult

Bars = list[tuple[str, Metric]]

# Above this spread the small bars of a linear scale say nothing.
LOG_SPREAD = 10.0
WIDTH = 10.0  # inches: 960 px, the width of a page
SUMMARY_FILE = "summary.png"


def draw_summary(result: RunResult, metrics: dict[str, Metric]) -> tuple[Picture | None, list[Omission]]:
    """Return the PNG and what is missing from it; the PNG is None when no panel has data."""
    panels = [
        ("perplexity", "perplexity", "perplexity (lower is better)", stage_bars(metrics)),
        ("throughput", "latency", "tokens/s (higher is better)", _pair(metrics, "latency", "tok_s")),
        (
            "KV cache",
            "memory",
            "bytes per token (lower is better)",
            _pair(metrics, "memory", "kv_bytes_per_token"),
        ),
    ]
    if any(bench.type == "accuracy" for bench in result.benchmarks):  # requested, so its absence is reported
        panels.append(
            ("accuracy", "accuracy", "mean over tasks (higher is better)", _pair(metrics, "accuracy", "mean"))
        )
    drawn = [panel for panel in panels if panel[3]]
    omitted = [
        Omission(f"{SUMMARY_FILE}: {name}", _reason(result, kind))
        for name, kind, _, bars in panels
        if not bars
    ]
    if not drawn:
        return None, [Omission(SUMMARY_FILE, "; ".join(item.reason for item in omitted))]
    widths = [max(3.3, 1.2 * len(bars) + 0.8) for *_, bars in drawn]
    with styled():
        grid = _panels(widths)
        figure = grid[0].figure
        for axes, (name, _, unit, bars) in zip(grid, drawn, strict=True):
            _draw_bars(axes, bars, unit, has_teacher=any(model == TEACHER for model, _ in bars))
            axes.set_title(_title(name, bars, metrics), loc="left")
            notes = [describe(dict(parse_key(bars[0][1].key).conditions))]
            notes += [f"bars: {_error_name(bars)}"] if any(metric.spread for _, metric in bars) else []
            axes.set_xlabel("\n".join(note for note in notes if note), fontsize=10, color="#555555")
        return to_picture(figure, result.labels), omitted


def stage_bars(metrics: dict[str, Metric]) -> Bars:
    """Return the perplexity rows in the order of training.

    The final student repeats the row of its last stage, so it appears itself only when no stage has its value.
    """
    rows = headline(metrics, "perplexity", "perplexity")
    bars = [(model, rows[model]) for model in STAGES if model in rows]
    bars += [
        (model, metric) for model, metric in rows.items() if model not in STAGES
    ]  # from-scratch variants
    stages = {metric.value for model, metric in bars if model.startswith("student_")}
    return [(model, metric) for model, metric in bars if not (model == STUDENT and metric.value in stages)]


def _pair(metrics: dict[str, Metric], family: str, field: str) -> Bars:
    found = headline(metrics, family, field)
    return [(model, found[model]) for model in (TEACHER, STUDENT) if model in found]


def _reason(result: RunResult, kind: str) -> str:
    has_metrics = any(bench.type == kind and bench.metrics for bench in result.benchmarks)
    return (
        "no exact 16-bit cache was measured"
        if kind == "memory" and has_metrics
        else missing_reason(result, kind)
    )


def _panels(widths: list[float]) -> list[Any]:
    """Return one panel a width in inches, in a row; the first above the others where the page is narrower."""
    if sum(widths) + 1.2 <= WIDTH:
        figure = new_figure(max(6.0, sum(widths) + 1.2), 4.6)
        return list(figure.subplots(1, len(widths), width_ratios=widths, squeeze=False)[0])
    figure = new_figure(WIDTH, 8.6)
    grid = figure.add_gridspec(2, max(1, len(widths) - 1))
    return [
        figure.add_subplot(grid[0, :]),
        *(figure.add_subplot(grid[1, at]) for at in range(len(widths) - 1)),
    ]


def _bar_name(model: str, has_teacher: bool) -> str:
    return "Model" if model == STUDENT and not has_teacher else name_of(model)


def _error_name(bars: Bars) -> str:
    return "standard error" if has_standard_error(bars[0][1]) else "standard deviation"


def _title(name: str, bars: Bars, metrics: dict[str, Metric]) -> str:
    ratio = metrics.get(ratio_key(parse_key(bars[0][1].key).field, bars[0][1]))
    first = name[0].upper() + name[1:]
    return f"{first}: student/teacher = {ratio.value:.4g}" if ratio and len(bars) > 1 else first


def ratio_key(field: str, metric: Metric) -> str:
    """Return the key of the ratio of `field` under the conditions of `metric`."""
    tail = metric.key.partition("@")[2]
    return f"ratio.{field}@{tail}" if tail else f"ratio.{field}"


def _draw_bars(axes: Any, bars: Bars, unit: str, *, has_teacher: bool) -> None:
    values = [metric.value for _, metric in bars]
    errors = [metric.spread or 0.0 for _, metric in bars]
    is_log = min(values) > 0 and max(values) / min(values) > LOG_SPREAD
    if is_log:
        log10_axis(axes)
    places = range(len(bars))
    axes.bar(
        places, values, width=0.66, color=[colour_of(model) for model, _ in bars], edgecolor="#444444", lw=0.6
    )
    # An error bar that reaches zero has no place on a logarithmic axis; it is cut just above it.
    below = [
        min(error, 0.99 * value) if is_log else error for error, value in zip(errors, values, strict=True)
    ]
    if any(errors):
        axes.errorbar(places, values, yerr=[below, errors], fmt="none", ecolor="#222222", capsize=4, lw=1.3)
    for place, value, error in zip(places, values, errors, strict=True):
        above = {"xytext": (0, 4), "textcoords": "offset points", "ha": "center", "fontsize": 10}
        axes.annotate(short_number(value), (place, value + error), **above)
    tops = [value + error for value, error in zip(values, errors, strict=True)]
    if is_log:
        axes.set_ylim(min(values) / 2, max(tops) * (max(tops) / min(values)) ** 0.12)
    else:
        axes.set_ylim(0, max(tops) * 1.14 or 1.0)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_xticks(list(places), [textwrap.fill(_bar_name(model, has_teacher), 11) for model, _ in bars])
    axes.set_ylabel(unit + (", log scale" if is_log else ""))
    label_ticks(axes.yaxis, short_number)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")
    axes.grid(visible=True, axis="y", color=FAINT)
