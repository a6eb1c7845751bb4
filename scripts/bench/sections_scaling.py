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
        given = f", {_settings(row)}" if row.get("settings") else ""
        lines.append(
            f"| {row['devices']} | {row['strategy']}{given} | {row['tokens_per_s']:,.0f} | {linear:.1%} "
            f"| {'' if must is None else f'{must:.0%}'} | {mfu} | {peak} | {row['losses'][-1]:.5f} |"
        )
    return [*lines, "", *verdicts(data)]


def verdicts(data: dict[str, Any]) -> list[str]:
    """Whether strategies scale as they must, each by its best row on the most devices, and their losses agree."""
    rows, most = data["rows"], max(row["devices"] for row in data["rows"])
    alone = next((row["tokens_per_s"] for row in rows if row["strategy"] == "single"), None)
    said = []
    for strategy in sorted({row["strategy"] for row in rows if row["devices"] == most} & data["must"].keys()):
        if alone is None or most == 1:
            continue
        several = [row for row in rows if (row["strategy"], row["devices"]) == (strategy, most)]
        best = max(several, key=lambda row: row["tokens_per_s"])
        share, must = best["tokens_per_s"] / (alone * most), data["must"][strategy]
        verdict = "met" if share >= must else "**missed**"
        said.append(f"{strategy} {share:.1%} with {_settings(best)} (must {must:.0%}): {verdict}")
    lines = [f"Best row of a strategy on {most} devices, of linear: {'; '.join(said)}."] if said else []
    apart, within = losses_apart(data), data["must"]["losses_within"]
    verdict = "met" if apart <= within else "**missed**"
    return [
        *lines,
        f"Largest difference of a step's loss between rows of as many devices: {apart:.1e} (must, with products in "
        f"bfloat16: {within:g}): {verdict}.",
    ]


def losses_apart(data: dict[str, Any]) -> float:
    """Return how far the losses of equal steps are apart at most, among rows of as many devices."""
    curves: dict[int, list[list[float]]] = {}
    for row in data["rows"]:
        curves.setdefault(row["devices"], []).append(row["losses"])
    steps = (step for several in curves.values() for step in zip(*several, strict=True))
    return max(max(step) - min(step) for step in steps)


def _settings(row: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in row.get("settings", {}).items()) or "default settings"


def tensor_parallel_step(data: dict[str, Any]) -> list[str]:
    """Seconds of a training step on one device and split over several, and how far their losses are apart."""
    lines = [
        f"## A training step split over devices ({data['size']}, {data['batch']} x {data['block']:,} tokens, weights "
        f"and states in bfloat16, {data['machine']['device']})",
        "",
        "| | devices | activations kept | step, s | tokens/s | of one device | peak, GB a device | loss, last step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone = {row["form"]: row for row in data["rows"] if row["devices"] == 1}
    for row in data["rows"]:
        one = alone[row["form"]]
        name = row["form"] + (", sequence parallel" if row["sequence_parallel"] else "")
        kept = {"none": "all", "selective": "products and attention", "full": "inputs of blocks"}[
            row["checkpointing"]
        ]
        peak = f"{row['peak_allocated_bytes'] / 1e9:.1f}" if "peak_allocated_bytes" in row else ""
        lines.append(
            f"| {name} | {row['devices']} | {kept} | {row['step_s']:.3f} | {row['tokens_per_s']:,.0f} "
            f"| {one['step_s'] / row['step_s']:.2f}x | {peak} | {row['losses'][-1]:.5f} |"
        )
    apart = max(
        abs(ours - theirs)
        for row in data["rows"]
        for ours, theirs in zip(row["losses"], alone[row["form"]]["losses"], strict=True)
    )
    return [
        *lines,
        "",
        f"Largest difference of a step's loss from one device's: {apart:.1e}. Must: faster than one device.",
    ]
