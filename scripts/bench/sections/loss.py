"""Section of the benchmarks page about head and cross-entropy."""

from __future__ import annotations

from typing import Any


def linear_cross_entropy(data: dict[str, Any]) -> list[str]:
    """Time, rate, memory and error of every side."""
    sizes = data["sizes"]
    lines = [
        f"## Head and cross-entropy, forward and backward ({sizes['tokens']:,} tokens, width {sizes['width']:,}, "
        f"vocabulary {sizes['vocabulary']:,})",
        "",
        "| side | ms (middle 60%) | TFLOP/s | besides inputs and gradients, GB | peak besides inputs, GB "
        "| error of dhidden, dweight |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in data["rows"].items():
        if "refused" in row:
            lines.append(f"| {name} | out of memory | | | | |")
            continue
        memory = [f"{row[key] / 1e9:.2f}" if key in row else "" for key in ("extra_bytes", "peak_bytes")]
        error = row.get("error")
        errors = f"{error['dhidden']:.1e}, {error['dweight']:.1e}" if error else ""
        lines.append(
            f"| {name} | {row['median_ms']:.2f} ({row['p20_ms']:.2f} to {row['p80_ms']:.2f}) | {row['tflops']:.0f} "
            f"| {' | '.join(memory)} | {errors} |"
        )
    return [
        *lines,
        "",
        f"{sizes['dtype'].removeprefix('torch.')}; 6 N M V operations; chunks of {data['chunk']} tokens, the softmax "
        f"of the first rows by {data['implementation']}. Errors are relative, against float64, on 512 tokens.",
    ]
