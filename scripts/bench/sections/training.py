"""Section of the benchmarks page about training steps against other loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTES = Path(__file__).with_name("step_gaps.json")
TRAINER, OURS_BARE = "caramba", "our model bare"
TITLES = {
    "bf16": "weights and states in bfloat16",
    "masters": "bfloat16 weights rounded from float32 masters",
    "fp8": "products in float8, against our own model in bfloat16",
}


def training(data: dict[str, Any]) -> list[str]:
    """Speed, MFU and memory of every side at every shape, and what one long sequence takes."""
    lines = [f"## Training steps of {data['model']} through the Trainer, against bare loops, in turns"]
    lines += _plot(data, "Tokens/s of every side")
    for name, part in data["parts"].items():
        if "skipped" in part:
            lines += ["", f"{name}: {part['skipped']}"]
        elif "rows" in part:
            lines += ["", *_beside(part)]
        elif "lines" in part:
            lines += [
                "",
                f"Kernels of {name.removeprefix('profile ')}, all of them in {part['file']}:",
                "",
                *part["lines"],
            ]
        else:
            lines += ["", *_long(part)]
    return lines


def _beside(part: dict[str, Any]) -> list[str]:
    clip = "nobody clips" if part["clip"] is None else f"all clip at {part['clip']:g}"
    lines = [
        f"{part['batch']} x {part['tokens']}, {TITLES[part['part']]}; median (middle 60%) of turns of "
        f"{part['steps_a_turn']} steps, {clip}:",
        "",
        "| side | tokens/s | MFU | step, ms | peak memory, GB | caramba over it |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in part["rows"].items():
        mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
        ratio = f"**{part['ratios'][name]:.3f}x**" if name in part["ratios"] else ""
        lines.append(
            f"| {name} | {row['tokens_per_s']:,.0f} ({row['p20']:,.0f} to {row['p80']:,.0f}) | {mfu} | "
            f"{row['step_ms']:.1f} | {peak} | {ratio} |"
        )
    order = part.get("transformers_attention")
    if order and "transformers" in part["rows"]:
        lines += [
            "",
            f"As transformers comes, torch tries {', '.join(order).lower()}, with the mask that it makes.",
        ]
    if part.get("bare_optimizer") != "ours":
        lines += [
            "",
            "In these figures our model bare took torch's fused AdamW and the Trainer ours, which is faster by itself "
            "(the section on optimiser steps): their ratio is not what Lightning adds alone.",
        ]
    if "over_bf16" in part:
        lines += ["", *_float8(part)]
    return lines + _verdicts(part)


def _float8(part: dict[str, Any]) -> list[str]:
    over = ", ".join(f"{name} **{ratio:.3f}x**" for name, ratio in part["over_bf16"].items())
    changes = {name: change for name, change in part["loss_change"].items() if change}
    lines = [f"Over our own model in bfloat16 (caramba with `float8={part['float8']}`): {over}."]
    if changes:
        said = ", ".join(f"{name} {change:+.4f}" for name, change in changes.items())
        lines += ["", f"Loss against bfloat16's after equal first steps from the same weights: {said}."]
    return lines


def _verdicts(part: dict[str, Any]) -> list[str]:
    """Say of every figure that is asked for whether it was reached; nothing where none are on record.

    Of float8 it is the recipe that ran through the Trainer. A ratio of two optimisers does not measure Lightning.
    """
    if "over_bf16" in part:
        got, recipe = part["over_bf16"][TRAINER], f"{TRAINER} with float8={part['float8']}"
        return [
            "",
            *(f"{got:.3f} over {must['over']}, by {recipe} {_held_to(got, must)}." for must in part["musts"]),
        ]
    said = [
        f"{must['got']:.3f} over {must['over']} "
        + (
            f"(must {must['limit']:g}): not comparable"
            if must["over"] == OURS_BARE and part.get("bare_optimizer") != "ours"
            else _held_to(must["got"], must)
        )
        for must in part.get("musts", [])
    ]
    return ["", f"{'; '.join(said)}."] if said else []


def _held_to(got: float, must: dict[str, Any]) -> str:
    return f"(must {must['limit']:g}): {'met' if got >= must['limit'] else '**missed**'}"


def _long(part: dict[str, Any]) -> list[str]:
    peaks = ", ".join(
        f"{key.removeprefix('peak_').removesuffix('_bytes')} {value / 1e9:.1f} GB"
        for key, value in part.items()
        if key.startswith("peak_")
    )
    spare = "" if part["spare"] is None else f"; {part['spare']:.0%} of the device is spare (must: 30%)"
    return [
        f"Peak memory of 1 x {part['tokens']:,}, full checkpointing, head and loss in chunks: {peaks}{spare}."
    ]


def step_profile(data: dict[str, Any]) -> list[str]:
    """The largest gaps of a step to its roofs, and where the device ran nothing."""
    lines = [
        f"## Where a training step of {data.get('model', 'a model')} takes longer than at the roofs",
        "",
        "| gap | class | ms a step | at the roof, ms | gap, ms |",
        "|---|---|---|---|---|",
        *(
            f"| `{gap['what'][:90]}` | {gap['class']} | {gap['ms']:.2f} | {gap['roof_ms']:.2f} | {gap['gap_ms']:.2f} |"
            for gap in data["gaps"]
        ),
        "",
        f"Busy {data['busy_ms']:.2f} ms a step, idle {data['idle_ms']:.2f}; all calls at the roofs"
        f" ({data['roof_tflops']:.0f} TFLOP/s, {data['roof_tb_s']:.2f} TB/s) {data['roof_ms']:.2f} ms.",
    ]
    if data.get("traced_idle_ms") is not None:
        lines[-1] += f" The trace itself is idle for {data['traced_idle_ms']:.2f} ms a step."
    lines += ["", "What was done about each:", ""]
    lines += [
        f"- `{_short(gap['what'])}` ({gap['gap_ms']:.2f} ms): {_done(gap['what'])}" for gap in data["gaps"]
    ]
    between = [f"{place['between']} {place['ms']:.2f} ms" for place in data["idle_between"][:3]]
    return lines + (["", f"Idle between: {'; '.join(between)}."] if between else [])


def _short(what: str) -> str:
    """Return a call without its shapes."""
    return what.split(" [")[0][:60]


def _done(what: str) -> str:
    """Return what is on record, by hand, about a gap."""
    notes = json.loads(NOTES.read_text(encoding="utf-8"))
    return next((note["done"] for note in notes if note["match"] in what), "**nothing yet**.")


def ladder(data: dict[str, Any]) -> list[str]:
    """Rows of the training ladder, each with the means of those before it."""
    whole = "" if data["is_whole"] else " (not whole: the run was stopped)"
    lines = [
        f"## The training ladder{whole}",
        "",
        f"`{data['command']}`",
        *_plot(data, "Speed and memory row by row"),
        "",
        "| row | batch | tokens/s | speed-up | MFU | peak, GB | of row 0 | loss change | noise | largest | tokens/s | "
        "ended by |",
        f"|{12 * '---|'}",
    ]
    for row in data["rows"]:
        if row["skipped"] is not None:
            lines.append(f"| {row['what']} | {row['skipped']} |{10 * ' |'}")
            continue
        times = f" x {row['accumulation']}" if row["accumulation"] > 1 else ""
        mfu = f"{row['mfu']:.1%}" if row.get("mfu") else ""
        delta = "" if row.get("val_loss_delta") is None else f"{row['val_loss_delta']:+.4f}"
        noise = "" if row.get("loss_noise") is None else f"{row['loss_noise']:.4f}"
        most = f"{row['largest_tok_s']:,.0f}" if row.get("largest_tok_s") else ""
        lines.append(
            f"| {row['what']} | {row['batch_size']}{times} | {row['tok_s']:,.0f} | {row['speed_up']:.2f}x | {mfu} | "
            f"{row['peak_bytes'] / 1e9:.1f} | {row['memory_ratio']:.2f} | {delta} | {noise} | "
            f"{row.get('largest_batch', '')} | {most} | {row.get('largest_ended') or ''} |"
        )
    return lines + _held(data["musts"])


def planned(data: dict[str, Any]) -> list[str]:
    """What auto chose, batches set by hand, and the must of planning."""
    chosen = data["parts"].get("plan", {})
    lines = ["## Planning: `batch: auto` against batches set by hand", "", f"`{data['command']}`", ""]
    if chosen:
        words = ", ".join(f"{key} {value}" for key, value in chosen["chosen"].items())
        lines += [
            f"Chosen in {chosen['planned_s']:.0f} s ({chosen['planning']}): {words}; {chosen['tokens_per_s'] or 0:,.0f}"
            " tokens/s.",
            "",
        ]
    lines += ["| batch by hand | tokens/s | out of memory |", "|---|---|---|"]
    lines += [
        f"| {size} | {row['tokens_per_s'] or 0:,.0f} | {row['out_of_memory']} |"
        for size, row in data["parts"].get("hand", {}).items()
    ]
    return lines + _held(data.get("musts", []))


def _plot(data: dict[str, Any], words: str) -> list[str]:
    return ["", f"![{words}](benchmarks/{data['plot']})"] if data.get("plot") else []


def _held(musts: list[dict[str, Any]]) -> list[str]:
    said = [
        f"{must.get('row', '')} {must['what']} {must['got']:.4g} (must {must['limit']:.4g}): "
        f"{'met' if must['is_met'] else '**missed**'}".strip()
        for must in musts
    ]
    return ["", f"{'; '.join(said)}."] if said else []
