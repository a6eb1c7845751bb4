"""Sections of the benchmarks page about kernels."""

from __future__ import annotations

from typing import Any

SIDES = ("ours", "eager", "compiled")


def kernels(data: dict[str, Any]) -> list[str]:
    """Kernels against torch, as shares of a copy's bandwidth."""
    lines = [
        "## Norms, RoPE, SwiGLU, dropout and Lion, bf16",
        "",
        "| kernel | shape | MB | ours, us (of a copy) | eager, us | compiled, us | must |"
        " error: ours, eager, compiled | host, us |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        cells = [_time(row["sides"].get(side)) for side in SIDES]
        errors = ", ".join(
            "none"
            if row["sides"].get(side, {}).get("error") is None
            else f"{row['sides'][side]['error']:.1e}"
            for side in SIDES
        )
        host = f"{row['host_us']:.1f}" if "host_us" in row else ""
        lines.append(
            f"| {row['name']}, {row['pass']} ({row['implementation']}) | {row['shape']} | {row['bytes'] / 1e6:.0f} |"
            f" {' | '.join(cells)} | {100 * row['must']:.0f}% | {errors} | {host} |"
        )
    roofs = [row["copy_tb_s"] for row in data["rows"]]
    return [
        *lines,
        "",
        f"Median (20% to 80%) of graph replays in turns, on cold tensors; MB are useful bytes. The copy of each row"
        f" moved {min(roofs):.2f} to {max(roofs):.2f} TB/s, read and written. Host: an eager call without gradients,"
        " or a backward (must 25).",
        "",
        "![Share of a copy's bandwidth](benchmarks/kernels.png)",
    ]


def host_cost(data: dict[str, Any]) -> list[str]:
    """Host time of eager calls: up to the launch, with what autograd adds, and of a backward."""
    kinds = ("forward", "forward with gradients", "backward")
    where = data["machine"]["launches"]
    lines = [
        f"## Host time of an op call, us (launches {where})",
        "",
        f"| op | {' | '.join(kinds)} |",
        "|---|---|---|---|",
    ]
    for row in data["rows"]:
        cells = [f"{row['us'][kind]:.1f}" if kind in row["us"] else "" for kind in kinds]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    must = data["rows"][0]["must_us"]
    return [
        *lines,
        "",
        f"The least of short runs; must {must:.0f} a forward. `nothing` is a backward that does nothing.",
    ]


def _time(side: dict[str, float] | None) -> str:
    if side is None:
        return "not run"
    return f"{side['median_us']:.1f} ({side['p20_us']:.1f} to {side['p80_us']:.1f}), {100 * side['of_copy']:.0f}%"
