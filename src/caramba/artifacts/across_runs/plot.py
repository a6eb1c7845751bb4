"""The plot of a sweep: a line over the one key that varies, lines for two, parallel coordinates for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from caramba.artifacts.across_runs.summary import Group, as_number, best_group
from caramba.artifacts.style import FAINT, INK, new_figure, short_number, styled, to_png

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#F0E442", "#000000")
# Values that span more than this are spread over a logarithmic axis.
_LOG_SPAN = 20.0
_MOST_LINES = len(COLOURS)
_MOST_TICKS = 12
_LABEL = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5}


def draw_sweep(
    groups: Sequence[Group],
    keys: Sequence[str],
    metric: str,
    title: str,
    *,
    is_higher: bool,
    labels: dict[str, str] | None = None,
) -> bytes | None:
    """Return the figure as PNG with bars of one deviation, or None without the metric or a varying key."""
    shown = [group for group in groups if group.spread(metric) is not None]
    if not shown or not keys:
        return None
    along, lines = _roles(shown, keys)
    with styled():
        figure = new_figure(7.2, 4.6) if along is not None else new_figure(max(6.0, 1.8 * (len(keys) + 1)), 4.8)
        axes = figure.subplots()
        if along is None:
            _parallel(figure, axes, shown, keys, metric, is_higher=is_higher)
        else:
            _lines(axes, shown, along, lines, keys, metric)
        has_bars = along is not None and any((spread := group.spread(metric)) and spread.std for group in shown)
        axes.set_title(title + ("\nbars: standard deviation over runs" if has_bars else ""), fontsize=11)
        return to_png(figure, labels or {})


def _roles(groups: Sequence[Group], keys: Sequence[str]) -> tuple[int | None, int | None]:
    """Return the index of the key along x and of the key that separates lines; None where keys have axes."""
    if len(keys) == 1:
        return 0, None
    if len(keys) > 2:
        return None, None
    distinct = [len({group.values[index] for group in groups}) for index in (0, 1)]
    numeric = [all(as_number(group.values[index]) is not None for group in groups) for index in (0, 1)]
    along = max((0, 1), key=lambda index: (numeric[index], distinct[index]))
    return (along, 1 - along) if distinct[1 - along] <= _MOST_LINES else (None, None)


def _lines(axes: Any, groups: Sequence[Group], along: int, lines: int | None, keys: Sequence[str], metric: str) -> None:
    ticks = list(dict.fromkeys(group.values[along] for group in groups))
    numbers = [as_number(text) for text in ticks]
    is_numeric = all(value is not None for value in numbers)
    place = {
        text: float(value) if is_numeric and value is not None else float(index)
        for index, (text, value) in enumerate(zip(ticks, numbers, strict=True))
    }
    names = list(dict.fromkeys(group.values[lines] for group in groups)) if lines is not None else [""]
    for name, colour in zip(names, COLOURS, strict=False):
        members = [group for group in groups if lines is None or group.values[lines] == name]
        spreads = [(place[group.values[along]], spread) for group in members if (spread := group.spread(metric))]
        axes.errorbar(
            [x for x, _ in spreads],
            [spread.mean for _, spread in spreads],
            yerr=[spread.std or 0.0 for _, spread in spreads],
            capsize=4,
            marker="o",
            ls="-" if is_numeric else "none",
            color=colour,
            label=f"{keys[lines]}={name}" if lines is not None else None,
        )
    places = sorted(place.values())
    if is_numeric and places[0] > 0 and places[-1] / places[0] > _LOG_SPAN:
        axes.set_xscale("log")
        axes.minorticks_off()
    if not is_numeric or len(ticks) <= _MOST_TICKS:
        axes.set_xticks([place[text] for text in ticks], ticks)
    _log_when_wide(axes, [spread.mean for group in groups if (spread := group.spread(metric))])
    axes.set_xlabel(keys[along])
    axes.set_ylabel(metric)
    if lines is not None:
        axes.legend()


def _parallel(
    figure: Any, axes: Any, groups: Sequence[Group], keys: Sequence[str], metric: str, *, is_higher: bool
) -> None:
    """One vertical axis per key and one for the metric; a line per group, dark where the metric is good."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    means = [spread.mean for group in groups if (spread := group.spread(metric)) is not None]
    low, high = min(means), max(means) if max(means) > min(means) else min(means) + 1
    scale = Normalize(low, high)
    colours: Any = ScalarMappable(scale, "viridis_r" if is_higher else "viridis")
    axes.grid(False)
    heights: list[dict[str, float]] = []
    for index in range(len(keys)):
        values = list(dict.fromkeys(group.values[index] for group in groups))
        values.sort(key=lambda text: (as_number(text) is None, as_number(text) or 0.0, text))
        heights.append(
            {text: at / max(1, len(values) - 1) if len(values) > 1 else 0.5 for at, text in enumerate(values)}
        )
        axes.axvline(index, color=FAINT, lw=1.5, zorder=0)
        for text, height in heights[-1].items():
            axes.text(index - 0.03, height, text, ha="right", va="center", fontsize=9, color=INK, bbox=_LABEL)
    axes.axvline(len(keys), color=FAINT, lw=1.5, zorder=0)
    best = best_group(groups, metric, is_higher=is_higher)
    for group, mean in zip(groups, means, strict=True):
        ys = [heights[index][value] for index, value in enumerate(group.values)] + [float(scale(mean))]
        axes.plot(range(len(ys)), ys, color=colours.to_rgba(mean), lw=3.5 if group is best else 1.4, alpha=0.9)
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        axes.text(len(keys) + 0.03, share, short_number(value), ha="left", va="center", fontsize=9)
    axes.set_xticks(range(len(keys) + 1), [*keys, metric.partition("@")[0]], rotation=12, fontsize=9)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlim(-0.35, len(keys) + 0.35)


def _log_when_wide(axes: Any, values: Sequence[float]) -> None:
    if values and min(values) > 0 and max(values) / min(values) > _LOG_SPAN:
        axes.set_yscale("log")
