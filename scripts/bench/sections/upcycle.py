"""Sections of the benchmarks page about what surgery and blockwise steps cost."""

from __future__ import annotations

import statistics
from typing import Any


def attention_backends(data: dict[str, Any]) -> list[str]:
    """Stock attention by backend on the shapes of teachers and students."""
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in data["rows"]:
        shapes.setdefault(row["shape"], {})[row["backend"]] = row
    lines = [
        "## Attention backends, bf16, causal, forward and backward",
        "",
        "| shape (batch, heads, KV heads, tokens, key width, value width) | flash, ms | cuDNN, ms | efficient, ms |",
        "|---|---|---|---|",
    ]
    for name, rows in shapes.items():
        cells = [_milliseconds(rows[backend]) for backend in ("FLASH", "CUDNN", "EFFICIENT")]
        sizes = ", ".join(str(size) for size in rows["CUDNN"]["sizes"])
        lines.append(f"| {name} ({sizes}) | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Median of 20 by device events (middle 60% in brackets); on Hopper runs take cuDNN first.",
    ]


def _milliseconds(row: dict[str, Any]) -> str:
    time = row.get("forward_backward")
    if time is None:
        return "refuses"
    return f"{time['median_ms']:.2f} ({time['p20_ms']:.2f} to {time['p80_ms']:.2f})"


def documents(data: dict[str, Any]) -> list[str]:
    """Attention layers on rows of documents, by what separates these."""
    batch, tokens = data["sizes"]
    lines = [
        f"## Documents of a row separated, one attention layer, forward and backward ({batch} x {tokens} tokens)",
        "",
        "| layer | documents a row | mask, ms | varlen, ms | peak memory, mask and varlen, GB | difference |",
        "|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        sides = [row["paths"].get(path, {}) for path in ("mask", "varlen")]
        times = [_milliseconds({"forward_backward": side}) if side else "not here" for side in sides]
        memory = ", ".join(f"{side['peak_bytes'] / 1e9:.2f}" for side in sides if "peak_bytes" in side)
        difference = f"{sides[1]['difference']:.1e}" if sides[1] else ""
        lines.append(
            f"| {row['layer']} | {row['documents']} | {' | '.join(times)} | {memory} | {difference} |"
        )
    return lines


def surgery_cost(data: dict[str, Any]) -> list[str]:
    """Time of calibration and surgery."""
    total, memory = data["calibration_s"] + data["surgery_s"], data["peak_memory_bytes"]
    peak = "not measured" if memory is None else f"{memory / 1e9:.1f}"
    return [
        f"## Calibration and surgery of {data['model']}, {data['tokens']:,} tokens",
        "",
        "| calibration, s | surgery, s | together, s (must 180, stretch 60) | peak memory, GB |",
        "|---|---|---|---|",
        f"| {data['calibration_s']:.1f} | {data['surgery_s']:.1f} | **{total:.1f}** | {peak} |",
        "",
        "Random weights and tokens: the cost does not depend on them. One run.",
    ]


def blockwise_cost(data: dict[str, Any]) -> list[str]:
    """Blockwise steps against one headless forward of the teacher, and where their time goes."""
    headless = data["ms"]["headless teacher forward"]
    concurrent = statistics.median(data["ms"]["concurrent, all"])
    peaks = data["peak_memory_bytes"]
    alone = ", no kernel but that of latent queries" if data.get("kernels") == "queries" else ""
    lines = [
        f"## A blockwise step of {data['model']}, {data['batch']} x {data['block']} tokens{alone}",
        "",
        "| what | ms, median (range) | over a headless teacher forward (range) | over a concurrent step | peak, GB |",
        "|---|---|---|---|---|",
    ]
    for name, times in data["ms"].items():
        ratios = [time / other for time, other in zip(times, headless, strict=True)]
        peak = f"{peaks[name] / 1e9:.1f}" if peaks else "not measured"
        lines.append(
            f"| {name} | {statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f}) |"
            f" {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) |"
            f" {statistics.median(times) / concurrent:.2f}x | {peak} |"
        )
    parts = {
        name: {part: statistics.median(ms) for part, ms in each.items()}
        for name, each in data["parts_ms"].items()
    }
    lines += [
        "",
        f"| parts of a step, ms | {' | '.join(next(iter(parts.values())))} |",
        "|---|" + "---|" * len(next(iter(parts.values()))),
        *(f"| {name} | {' | '.join(f'{ms:.1f}' for ms in each.values())} |" for name, each in parts.items()),
    ]
    setting = ["bf16 autocast"] * bool(data["amp"]) + ["attention layers compiled"] * bool(data["compiled"])
    return [
        *lines,
        "",
        f"Setting: {', '.join(setting) or 'fp32, eager'}; ratios are taken repeat by repeat. `maps`, which the model's"
        " presets run (`trainable=auto`), leaves W_q and W_o as surgery copied them; `attention KL` adds 0.1 of it on"
        " 64 queries. Must: concurrent 2.0x a headless forward; sequential 4x (with truncated forwards) and 12x (with"
        " full forwards, 'naive') a concurrent step.",
        *(["", f"Left out: {data['left_out']}."] if "left_out" in data else []),
    ]
