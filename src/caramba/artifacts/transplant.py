"""transplant.csv and transplant.png: what surgery kept of each attention layer, and what it cost."""

from __future__ import annotations

import dataclasses

from caramba.artifacts.report import Omission
from caramba.artifacts.style import COLOURS, OTHER_COLOUR, Picture, new_figure, styled, to_picture
from caramba.result import RunResult, TransplantedLayer
from caramba.runs.files import csv_text

CSV_FILE, TRANSPLANT_FILE = "transplant.csv", "transplant.png"
_BLOCK = "block_relative_l1"


def transplant_csv(result: RunResult) -> str | None:
    """Return one row per converted layer, or None when surgery converted none.

    Besides the fields of TransplantedLayer: `layer`, its index, `kv_ratio`, the teacher's cached elements over the
    student's, and `block_relative_l1`, the block's error on training windows where it was measured for every layer.
    """
    layers = _layers(result)
    if not layers:
        return None
    names = [field.name for field in dataclasses.fields(TransplantedLayer)]
    blocks = _block_errors(result)
    rows: list[list[object]] = [["layer", *names, "kv_ratio", _BLOCK]]
    for index, layer in enumerate(layers):
        ratio = layer.teacher_cached / layer.cached
        rows.append([index, *(getattr(layer, name) for name in names), ratio, blocks[index] if blocks else ""])
    return csv_text(rows)


def draw_transplant(result: RunResult) -> tuple[Picture | None, list[Omission]]:
    """Return error and energy kept per layer above the elements that each layer caches, or why there is none."""
    layers = _layers(result)
    if not layers:
        reason = "no transplant was made" if result.transplant is None else "surgery converted no layer"
        return None, [Omission(CSV_FILE, reason), Omission(TRANSPLANT_FILE, reason)]
    held = [layer.error for layer in layers]
    kept = [layer.energy_kept for layer in layers]
    blocks = _block_errors(result)
    places = list(range(len(layers)))
    with styled():
        figure = new_figure(7.5, 6.0)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for values, label, colour, marker in (
            (held, "block error, held out (relative RMS)", COLOURS["student"], "o"),
            (blocks, "block error (relative L1)", COLOURS["student_blockwise"], "s"),
            (kept, "energy kept", COLOURS["teacher"], "^"),
        ):
            shown = [(place, value) for place, value in zip(places, values, strict=False) if value is not None]
            if shown:
                above.plot(*zip(*shown, strict=True), color=colour, marker=marker, label=label)
        above.set_ylim(0, max(1.05, above.get_ylim()[1]))
        above.set_ylabel("share (error: lower is better)")
        method = result.transplant.method if result.transplant is not None else ""
        above.set_title(f"Surgery, method {method}", loc="left")
        if above.get_lines():
            above.legend(loc="best")
        bottom = [0] * len(layers)
        for field, label, colour in (
            ("sem_dim", "semantic or latent", OTHER_COLOUR),
            ("geo_dim", "geometric", COLOURS["teacher_continued"]),
            ("v_dim", "values", COLOURS["student_transplant"]),
        ):
            heights = [getattr(layer, field) for layer in layers]
            if any(heights):
                below.bar(places, heights, bottom=bottom, width=0.7, color=colour, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        below.set_xlabel("attention layer")
        below.set_ylabel("cached elements per token")
        below.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
        below.xaxis.get_major_locator().set_params(integer=True)
        return to_picture(figure, result.labels), []


def _layers(result: RunResult) -> tuple[TransplantedLayer, ...]:
    return () if result.transplant is None else result.transplant.layers


def _block_errors(result: RunResult) -> tuple[float, ...]:
    """Return the errors on training windows when there is one for each converted layer."""
    report = result.transplant
    return report.layer_errors if report is not None and len(report.layer_errors) == len(report.layers) else ()
