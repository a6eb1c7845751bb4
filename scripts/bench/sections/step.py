"""Sections of the benchmarks page about the single kernels of training and decode steps, and of optimisers."""

from __future__ import annotations

from typing import Any


def step_kernels(data: dict[str, Any]) -> list[str]:
    """Kernels of a compiled training step against a copy of memory."""
    rows = []
    for row in data["rows"]:
        rate = f"{row['tb_per_s']:.2f}" if row["bytes"] else ""
        others = ", ".join(f"{name} {us:.1f}" for name, us in row["other"].items())
        rows.append(f"| {row['name']} | {row['us']:.1f} | {row['bytes'] / 1e6:.0f} | {rate} | {others} |")
    return [
        "## Kernels of a training step at 8 x 2048 tokens of a 1B model, bf16",
        "",
        "| kernel | us | MB | TB/s | with other constants, us |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "MB are what has to be read and written. The last row is the roof.",
    ]


def optimizer_steps(data: dict[str, Any]) -> list[str]:
    """Optimiser steps, and AdamW's against torch's fused one."""
    lines = ["## Optimiser steps of a 1B model", ""]
    if "rows" in data:
        lines += ["| step | ms | peak, GB |", "|---|---|---|"]
        for row in data["rows"]:
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.1f}"
            lines.append(f"| {row['name']} | {row['ms']:.2f} | {peak} |")
        lines.append("")
    if "adamw" in data:
        lines += [
            "| AdamW | ms on the device | GB | TB/s | of a copy's | host, ms | peak, GB |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in data["adamw"]["rows"]:
            share, peak = row.get("share_of_copy"), row.get("peak_bytes")  # not in files of before
            lines.append(
                f"| {row['name']} | {row['device_ms']:.2f} | {row['bytes'] / 1e9:.1f} "
                f"| {row['bytes_per_s'] / 1e12:.2f} | {'' if share is None else f'{share:.0%}'} "
                f"| {row['host_ms']:.2f} | {'' if peak is None else f'{peak / 1e9:.1f}'} |"
            )
    return lines


def row_linear(data: dict[str, Any]) -> list[str]:
    """Linear maps of a few rows against torch's own chain and its product alone."""
    has_codes = data.get("codes", False)
    form = f"weights in codes of {data.get('bits', 8)} bits" if has_codes else "bf16"
    more = " of 16 bits by ours, us |" if has_codes else ""
    lines = [
        f"## Linear maps of a decode step's rows (1B, {form}, cold weights, graph replays)",
        "",
        "| map | weight | rows | ours, us (of the read roof) | torch, us | its product, us | error: ours, torch |"
        + more,
        "|---|---|---|---|---|---|---|" + ("---|" if has_codes else ""),
    ]
    for row in data["rows"]:
        us, share, error = row["us"], row["of_roof"], row["error"]
        lines.append(
            f"| {row['name']} | {row['weight'][0]} x {row['weight'][1]} | {row['rows']} "
            f"| {us['ours']:.1f} ({100 * share['ours']:.0f}%) | {us['torch']:.1f} | {us['product']:.1f} "
            f"| {error['ours']:.1e}, {error['torch']:.1e} |"
            + (f" {us['numbers']:.1f} |" if has_codes else "")
        )
    return [
        *lines,
        "",
        f"Read roof: {data['read_bytes_per_s'] / 1e12:.2f} TB/s; what the L2 still holds of a weight is extra. "
        "`torch` is the chain that ours replaces: norm, product, gate or sum.",
    ]
