"""summary.png: perplexity of every stage, throughput and KV bytes; latency_vs_context.png and memory_scaling.png."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import Any

from caramba.artifacts.key import Condition, MetricKey, parse_key
from caramba.artifacts.metrics import STAGES, STUDENT, TEACHER, describe, has_standard_error, headline
from caramba.artifacts.report import Omission
from caramba.artifacts.rows import missing_reason
from caramba.artifacts.style import (
    FAINT,
    Picture,
    byte_text,
    colour_of,
    label_ticks,
    log2_axis,
    log10_axis,
    name_of,
    new_figure,
    short_number,
    styled,
    to_picture,
)
from caramba.result import Metric, RunResult

Bars = list[tuple[str, Metric]]

# Above this spread the small bars and low curves of a linear scale say nothing.
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
    omitted = [Omission(f"{SUMMARY_FILE}: {name}", _reason(result, kind)) for name, kind, _, bars in panels if not bars]
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
    bars += [(model, metric) for model, metric in rows.items() if model not in STAGES]  # from-scratch variants
    stages = {metric.value for model, metric in bars if model.startswith("student_")}
    return [(model, metric) for model, metric in bars if not (model == STUDENT and metric.value in stages)]


def _pair(metrics: dict[str, Metric], family: str, field: str) -> Bars:
    found = headline(metrics, family, field)
    return [(model, found[model]) for model in (TEACHER, STUDENT) if model in found]


def _reason(result: RunResult, kind: str) -> str:
    has_metrics = any(bench.type == kind and bench.metrics for bench in result.benchmarks)
    return "no exact 16-bit cache was measured" if kind == "memory" and has_metrics else missing_reason(result, kind)


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
    axes.bar(places, values, width=0.66, color=[colour_of(model) for model, _ in bars], edgecolor="#444444", lw=0.6)
    # An error bar that reaches zero has no place on a logarithmic axis; it is cut just above it.
    below = [min(error, 0.99 * value) if is_log else error for error, value in zip(errors, values, strict=True)]
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


LATENCY_FILE, MEMORY_FILE = "latency_vs_context.png", "memory_scaling.png"

# A curve's model, the conditions that it holds fixed, and its points (length, metric).
Curve = tuple[str, dict[str, Condition], list[tuple[int, Metric]]]
BYTES = "bytes"
_DASHES = ("-", ":", "-.", (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 3)))
_MARKERS = ("o", "s", "^", "D", "v", "P")


def draw_latency(result: RunResult, metrics: dict[str, Metric]) -> tuple[Picture | None, list[Omission]]:
    """Return decode tokens/s and prefill milliseconds against prompt length, or why there is none.

    Bars reach from the 20th to the 80th percentile where the benchmark's rows carry them.
    """
    panels = [
        ("tok_s", "Decode throughput", "tokens/s (higher is better)"),
        ("prefill_ms", "Prefill time", "milliseconds (lower is better)"),
    ]
    found = [(*panel, curves(metrics, "latency", panel[0], "prompt")) for panel in panels]
    reason = missing_reason(result, "latency")
    omitted = [Omission(f"{LATENCY_FILE}: {field}", reason) for field, *_, lines in found if not lines]
    drawn = [panel for panel in found if panel[3]]
    if not drawn:
        return None, [Omission(LATENCY_FILE, reason)]
    with styled():
        figure = new_figure(9.0, 3.8 * len(drawn))
        grid = figure.subplots(len(drawn), 1, squeeze=False)[:, 0]
        for axes, (field, title, unit, lines) in zip(grid, drawn, strict=True):
            _draw_curves(axes, lines, _value, functools.partial(_percentiles, result, field))
            bars = "; bars: 20th to 80th percentile" if axes.containers else ""
            _finish(axes, lines, title, f"prompt length (tokens){bars}", unit)
        return to_picture(figure, result.labels), omitted


def _value(metric: Metric, _: int) -> float:
    return metric.value


def draw_memory(result: RunResult, metrics: dict[str, Metric]) -> tuple[Picture | None, list[Omission]]:
    """Return cache bytes against sequence length per model and format, with the models' own bytes dashed."""
    found = curves(metrics, "memory", "kv_bytes_per_token", "seq")
    if not found:
        return None, [Omission(MEMORY_FILE, missing_reason(result, "memory"))]
    with styled():
        figure = new_figure(8.0, 5.0)
        axes = figure.subplots()
        _draw_curves(axes, found, lambda metric, length: metric.value * length, lambda _: None)
        sizes = {model: points[-1][1] for model, _, points in curves(metrics, "memory", "model_bytes", "seq")}
        for model, metric in sizes.items():
            label = f"{name_of(model)}, weights ({byte_text(metric.value)})"
            axes.axhline(metric.value, color=colour_of(model), ls="--", lw=1.5, label=label)
        _finish(axes, found, "KV cache, one sequence", "sequence length (tokens)", BYTES)
        return to_picture(figure, result.labels), []


def curves(metrics: dict[str, Metric], family: str, field: str, along: str) -> list[Curve]:
    """Return one curve per model and fixed conditions, its points in order of the condition `along`."""
    groups: dict[MetricKey, list[tuple[int, Metric]]] = {}
    for metric in metrics.values():
        key = parse_key(metric.key)
        length = key.conditions.get(along)
        if (key.family, key.field) != (family, field) or key.model is None or not isinstance(length, int) or length < 1:
            continue
        rest = {name: value for name, value in key.conditions.items() if name != along}
        groups.setdefault(MetricKey(family, key.model, field, rest), []).append((length, metric))
    ordered = sorted(groups.items(), key=lambda group: _rank(str(group[0].model)))
    return [
        (str(key.model), dict(key.conditions), sorted(points, key=lambda point: point[0])) for key, points in ordered
    ]


def _rank(model: str) -> tuple[int, str]:
    return (STAGES.index(model), "") if model in STAGES else (len(STAGES), model)


def _draw_curves(
    axes: Any,
    found: list[Curve],
    height: Callable[[Metric, int], float],
    bounds: Callable[[Metric], tuple[float, float] | None],
) -> None:
    """Colours separate models; dashes and markers separate the fixed conditions."""
    kinds = list(dict.fromkeys(tuple(sorted(fixed.items())) for _, fixed, _ in found))
    for model, fixed, points in found:
        kind = kinds.index(tuple(sorted(fixed.items()))) % len(_DASHES)
        xs = [length for length, _ in points]
        ys = [height(metric, length) for length, metric in points]
        ranges = [bounds(metric) or (y, y) for (_, metric), y in zip(points, ys, strict=True)]
        errors = [
            [max(0.0, y - low) for y, (low, _) in zip(ys, ranges, strict=True)],
            [max(0.0, high - y) for y, (_, high) in zip(ys, ranges, strict=True)],
        ]
        has_spread = any(any(side) for side in errors)
        label = name_of(model) if len(kinds) == 1 else f"{name_of(model)}, {describe(fixed)}"
        look = {"color": colour_of(model), "ls": _DASHES[kind], "marker": _MARKERS[kind], "label": label}
        if has_spread:
            axes.errorbar(xs, ys, yerr=errors, capsize=4, elinewidth=1.3, **look)
        else:
            axes.plot(xs, ys, **look)


def _percentiles(result: RunResult, field: str, metric: Metric) -> tuple[float, float] | None:
    """Return the lowest 20th and highest 80th percentile of the rows behind a metric; None when none carries them."""
    key = parse_key(metric.key)
    wanted = {
        "model": key.model,
        **{name: value for name, value in key.conditions.items() if name != "bench"},
    }
    low, high = f"{field}_p20", f"{field}_p80"
    benches = [bench for bench in result.benchmarks if bench.type == "latency" and bench.id == metric.source]
    every = [row for bench in benches for row in bench.rows]
    rows = [row for row in every if all(row.get(name) == value for name, value in wanted.items())]
    found = [(row[low], row[high]) for row in rows if row.get(low) is not None and row.get(high) is not None]
    return (min(pair[0] for pair in found), max(pair[1] for pair in found)) if found else None


def _finish(axes: Any, found: list[Curve], title: str, x_label: str, unit: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    log2_axis(axes, [length for *_, points in found for length, _ in points])
    fixed = {tuple(sorted(conditions.items())): conditions for _, conditions, _ in found}
    only = next(iter(fixed.values())) if len(fixed) == 1 else {}
    axes.set_title(f"{title} ({describe(only)})" if only else title, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(unit)
    heights = [y for line in axes.get_lines() for y in line.get_ydata() if y > 0]
    if heights and max(heights) / min(heights) > LOG_SPREAD:
        log10_axis(axes)
        axes.set_ylim(min(heights) / 1.6, max(heights) * 1.6)
        if unit == BYTES:
            # Powers of two are whole numbers of KiB and MiB.
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_locator(LogLocator(base=2, numticks=9))
            axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    label_ticks(axes.yaxis, byte_text if unit == BYTES else short_number)
    is_crowded = len(axes.get_legend_handles_labels()[0]) > 4
    axes.legend(**({"loc": "upper left", "bbox_to_anchor": (1.01, 1.0)} if is_crowded else {"loc": "best"}))
