"""Section of the benchmarks page about training steps beside other loops."""

from __future__ import annotations

from typing import Any

TITLES = {
    "bf16": "weights and states in bfloat16",
    "masters": "bfloat16 weights rounded from float32 masters",
    "fp8": "products in float8, beside our own model in bfloat16",
}


def training(data: dict[str, Any]) -> list[str]:
    """Speed, MFU and memory of every side at every shape, and what one long sequence takes."""
    lines = [f"## Training steps of {data['model']} through the Trainer, beside bare loops, in turns"]
    for name, part in data["parts"].items():
        if "skipped" in part:
            lines += ["", f"{name}: {part['skipped']}"]
        elif "rows" in part:
            lines += ["", *_beside(part)]
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
    return lines


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
