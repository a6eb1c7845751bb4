"""Section of the benchmarks page about several devices."""

from __future__ import annotations

from typing import Any


def scaling(data: dict[str, Any]) -> list[str]:
    """Tokens per second by strategy and number of devices, beside one device, and how far losses are apart."""
    alone = next(row["tokens_per_s"] for row in data["rows"] if row["strategy"] == "single")
    lines = [
        f"## Weak scaling of pretraining ({data['size']}, {data['batch']} x {data['block']:,} tokens a device, "
        f"{'compiled' if all(row['compiled'] for row in data['rows']) else 'eager'})",
        "",
        "| devices | strategy | tokens/s | of linear | must | MFU | peak, GB a device | loss after "
        f"{data['steps']} steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(data["rows"], key=lambda row: row["devices"]):
        linear = row["tokens_per_s"] / (alone * row["devices"])
        must = data["must"].get(row["strategy"]) if row["devices"] > 1 else None
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        peak = f"{row['peak_allocated_bytes'] / 1e9:.1f}" if "peak_allocated_bytes" in row else ""
        lines.append(
            f"| {row['devices']} | {row['strategy']} | {row['tokens_per_s']:,.0f} | {linear:.1%} "
            f"| {'' if must is None else f'{must:.0%}'} | {mfu} | {peak} | {row['losses'][-1]:.5f} |"
        )
    return [
        *lines,
        "",
        f"Largest difference of a step's loss between strategies on as many devices: {_apart(data):.1e}.",
    ]


def _apart(data: dict[str, Any]) -> float:
    """Return how far the losses of equal steps are apart at most, among rows of as many devices."""
    curves: dict[int, list[list[float]]] = {}
    for row in data["rows"]:
        curves.setdefault(row["devices"], []).append(row["losses"])
    return max(
        abs(value - other)
        for several in curves.values()
        for curve in several
        for value, other in zip(several[0], curve, strict=True)
    )
