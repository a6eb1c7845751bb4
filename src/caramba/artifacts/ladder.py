"""inference_ladder.png: decode throughput rung by rung; and the rows of comparisons that state their own ratios."""

from __future__ import annotations

from typing import Any

from caramba.artifacts.key import MetricKey
from caramba.artifacts.report import Omission
from caramba.artifacts.rows import collect_measured_rows, omit_if_asked
from caramba.artifacts.style import (
    Picture,
    byte_text,
    colour_of,
    label_ticks,
    name_of,
    new_figure,
    short_number,
    styled,
    to_picture,
)
from caramba.result import RunResult

INFERENCE, LADDER_FILE = "inference_ladder", "inference_ladder.png"


def draw_ladder(result: RunResult) -> tuple[Picture | None, list[Omission]]:
    """Return a bar per model and rung with its middle 60%; nothing where no ladder was asked for."""
    rows = collect_measured_rows(result, INFERENCE)
    if not rows:
        return None, omit_if_asked(result, INFERENCE, LADDER_FILE)
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
            axes.errorbar(values, places, xerr=[below, above], fmt="none", ecolor="#222222", capsize=3, elinewidth=1.2)
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


TRAINING, TRAINING_LADDER_FILE = "ladder", "ladder.png"
TRAINING_HEAD = (
    *("Row", "Batch", "Tokens/s", "Speed-up", "Peak memory", "Loss change (nats)", "Loss noise (nats)"),
    *("Largest", "Fastest", "Ended by"),
)
FIELDS = ("tok_s", "speed_up", "peak_bytes", "val_loss_delta", "loss_noise", "largest_batch", "largest_tok_s")
FIXED, LARGEST, TWIN, LEFT_OUT = "#0072B2", "#E69F00", "#009E73", "#999999"


def ladder_keys(result: RunResult) -> list[tuple[tuple[str, str], list[str], str]]:
    """Return each measured row's name, the keys of its `FIELDS`, and what ended the search of a larger batch."""
    found: list[tuple[tuple[str, str], list[str], str]] = []
    for row in collect_measured_rows(result, TRAINING):
        times = f" \u00d7 {row['accumulation']}" if row["accumulation"] > 1 else ""
        given = {"row": row["row"], "batch": row["batch_size"], "accumulate": row["accumulation"]}
        given |= {"block": row["block_size"]}
        keys = [MetricKey(TRAINING, row["model"], field, given).format() for field in FIELDS]
        ended = str(row.get("largest_ended") or "")
        found.append(((str(row["what"]), f"{row['batch_size']}{times}"), keys, ended))
    return found


def draw_training_ladder(result: RunResult) -> tuple[Picture | None, list[Omission]]:
    """Return bars of speed and memory for every row; nothing where no ladder was asked for."""
    rows = collect_measured_rows(result, TRAINING)
    if not rows:
        return None, omit_if_asked(result, TRAINING, TRAINING_LADDER_FILE)
    with styled():
        figure = new_figure(10.0, 1.8 + 0.48 * len(rows))
        speed, memory = figure.subplots(1, 2, sharey=True)
        _bars(speed, rows, "tok_s", "largest_tok_s", short_number)
        _bars(memory, rows, "peak_bytes", "largest_peak_bytes", byte_text)
        speed.set_yticks(range(len(rows)), [_label(row) for row in rows])
        speed.invert_yaxis()
        speed.set_xlabel("tokens/s (right is faster)")
        speed.set_title(f"Training ladder{_noise(rows)}", loc="left")
        memory.set_xlabel("peak memory (left is less)")
        handles, labels = speed.get_legend_handles_labels()
        if len(set(labels)) > 1:
            figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
        return to_picture(figure, result.labels), []


def _bars(axes: Any, rows: list[dict[str, Any]], fixed: str, largest: str, text: Any) -> None:
    """Draw a row's figure at the ladder's batch, and above it the one at its largest batch."""
    named: set[str] = set()
    for place, row in enumerate(rows):
        pairs = [(row[fixed], _colour(row), _legend(row))]
        if row.get(largest) is not None:
            pairs.append((row[largest], LARGEST, "at the largest batch"))
        height = 0.8 / len(pairs)
        for index, (value, colour, legend) in enumerate(pairs):
            at = place + (index - (len(pairs) - 1) / 2) * height
            label = None if legend in named else legend
            named.add(legend)
            axes.barh(at, value, height=0.92 * height, color=colour, label=label)
            axes.annotate(text(value), (value, at), xytext=(4, -3), textcoords="offset points", fontsize=10)
    most = max(float(row[key]) for row in rows for key in (fixed, largest) if row.get(key) is not None)
    axes.set_xlim(0, 1.22 * most)
    axes.grid(visible=False, axis="y")
    axes.locator_params(axis="x", nbins=4)
    label_ticks(axes.xaxis, text)


def _colour(row: dict[str, Any]) -> str:
    if row["row"] == "largest_batch":
        return LARGEST
    if row["row"].startswith("twin_"):
        return TWIN
    return LEFT_OUT if row["row"].startswith("without_") else FIXED


def _legend(row: dict[str, Any]) -> str:
    return {
        FIXED: "at the ladder's batch",
        LARGEST: "at the largest batch",
        TWIN: "top again",
        LEFT_OUT: "one left out of the top",
    }[_colour(row)]


def _noise(rows: list[dict[str, Any]]) -> str:
    """Say how the held-out losses of the runs of the top spread, where it ran again."""
    row = next((row for row in reversed(rows) if row.get("loss_noise") is not None), None)
    return "" if row is None else f": noise of loss {row['loss_noise']:.4f} nats, {row['loss_runs']} runs of the top"


def _label(row: dict[str, Any]) -> str:
    delta = row.get("val_loss_delta")
    return row["what"] if delta is None else f"{row['what']}  ({delta:+.4f} nats)"
