"""Section of the benchmarks page about prompts: whole models, and the attention of wide keys."""

from __future__ import annotations

from typing import Any


def prefill(data: dict[str, Any]) -> list[str]:
    """Seconds of a prompt by layout, and milliseconds of attention by backend."""
    lines = [f"## Prompts ({data['size']}, random weights, batch 1)"]
    models = data["models"]
    if models:
        first = models[0]
        lines += [
            "",
            f"{first['tokens']:,} tokens by {first['chunk']:,}; eager, median (range) of runs in turns:",
            "",
            "| layout | s | tokens/s | over gqa |",
            "|---|---|---|---|",
        ]
        base = next((row["s"] for row in models if row["layout"] == "gqa"), None)
        for row in models:
            times = row["all_s"]
            ratio = "" if base is None else f"{row['s'] / base:.2f}x"
            spread = f"{row['s']:.3f} ({min(times):.3f} to {max(times):.3f})"
            lines.append(f"| {row['side']} | {spread} | {row['tok_s']:,.0f} | {ratio} |")
        lines += [
            "",
            *(
                f"`{row['side']}` attends by the {row['attends_by']} implementation of `decoupled_attention`; its last"
                f" logits differ from those of joined keys by {row['difference']:.1e} (relative)."
                for row in models
                if "difference" in row
            ),
        ]
    if data["ops"]:
        lines += [
            "",
            "Attention alone, keys of two parts of which one is shared by all heads, causal. Of the backends of"
            " `scaled_dot_product_attention` joining keys is not timed; padded ones have values as wide as keys:",
            "",
            "| shape | heads, widths | side | ms, median (range) | TFLOP/s | error |",
            "|---|---|---|---|---|---|",
            *(_op(row) for row in data["ops"]),
            "",
            "TFLOP/s counts each product of the pairs that causality leaves once; errors are relative, against float64,"
            " on few heads and tokens.",
        ]
    if data["left_out"]:
        lines += ["", f"Left out: {'; '.join(data['left_out'])}."]
    return lines


def _op(row: dict[str, Any]) -> str:
    sem, geo, value = row["widths"]
    where = f"| {row['shape']} | {row['heads']}, {sem} + {geo} and {value} | {row['side']}"
    if "refused" in row:
        return f"{where} | refuses | | |"
    times = row["all_ms"]
    spread = f"{row['ms']:.2f} ({min(times):.2f} to {max(times):.2f})"
    return f"{where} | {spread} | {row['tflop_s']:,.0f} | {row['error']:.1e} |"
