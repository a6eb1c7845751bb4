"""Section of the benchmarks page about several devices."""

from __future__ import annotations

from typing import Any

from merge_runs import sitting_of


def scaling(data: dict[str, Any]) -> list[str]:
    """Tokens per second by strategy and number of devices, against one device, and how far losses differ."""
    sittings = any(sitting_of(row) for row in data["rows"])
    lines = [
        f"## Weak scaling of pretraining ({data['size']}, {data['batch']} x {data['block']:,} tokens a device, "
        f"{'compiled' if all(row['compiled'] for row in data['rows']) else 'eager'})",
        "",
        *(["![Tokens/s against devices](benchmarks/scaling.png)", ""] if data.get("plot") else []),
        "| devices | strategy | tokens/s | of linear | must | MFU | peak, GB a device | loss after "
        f"{data['steps']} steps |{' sitting |' if sittings else ''}",
        "|---|---|---|---|---|---|---|---|" + ("---|" if sittings else ""),
    ]
    for row in sorted(data["rows"], key=lambda row: row["devices"]):
        linear = share_of_linear(data, row)
        must = data["must"].get(row["strategy"]) if row["devices"] > 1 else None
        mfu = f"{row['mfu']:.1%}" if "mfu" in row else ""
        peak = f"{row['peak_allocated_bytes'] / 1e9:.1f}" if "peak_allocated_bytes" in row else ""
        given = f", {settings_of(row)}" if row.get("settings") else ""
        lines.append(
            f"| {row['devices']} | {row['strategy']}{given} | {row['tokens_per_s']:,.0f} "
            f"| {'' if linear is None else f'{linear:.1%}'} | {'' if must is None else f'{must:.0%}'} "
            f"| {mfu} | {peak} | {row['losses'][-1]:.5f} |{f' {sitting_of(row)} |' if sittings else ''}"
        )
    if sittings:
        lines += ["", "Of linear is of the row of one device, `single`, of the same sitting."]
    return [*lines, "", *verdicts(data)]


def share_of_linear(data: dict[str, Any], row: dict[str, Any]) -> float | None:
    """Return a row's speed over that of `single` in its sitting times its devices; nothing where none ran there."""
    alone = [
        other["tokens_per_s"]
        for other in data["rows"]
        if other["strategy"] == "single" and sitting_of(other) == sitting_of(row)
    ]
    return row["tokens_per_s"] / (alone[0] * row["devices"]) if alone else None


def verdicts(data: dict[str, Any]) -> list[str]:
    """Whether strategies scale as they must, each by its best row on the most devices, and their losses agree."""
    rows, most = data["rows"], max(row["devices"] for row in data["rows"])
    said = []
    for strategy in sorted({row["strategy"] for row in rows if row["devices"] == most} & data["must"].keys()):
        several = [row for row in rows if (row["strategy"], row["devices"]) == (strategy, most)]
        shares = [(share, row) for row in several if (share := share_of_linear(data, row)) is not None]
        if not shares or most == 1:
            continue
        share, best = max(shares, key=lambda pair: pair[0])
        must = data["must"][strategy]
        verdict = "met" if share >= must else "**missed**"
        said.append(f"{strategy} {share:.1%} with {settings_of(best)} (must {must:.0%}): {verdict}")
    lines = [f"Best row of a strategy on {most} devices, of linear: {'; '.join(said)}."] if said else []
    apart, within = losses_apart(data), data["must"]["losses_within"]
    verdict = "met" if apart <= within else "**missed**"
    return [
        *lines,
        f"Largest difference of a step's loss between rows of as many devices: {apart:.1e} (must, with products in "
        f"bfloat16: {within:g}): {verdict}.",
    ]


def losses_apart(data: dict[str, Any]) -> float:
    """Return how far the losses of equal steps differ at most, among rows of as many devices."""
    curves: dict[int, list[list[float]]] = {}
    for row in data["rows"]:
        curves.setdefault(row["devices"], []).append(row["losses"])
    steps = (step for several in curves.values() for step in zip(*several, strict=True))
    return max(max(step) - min(step) for step in steps)


def settings_of(row: dict[str, Any]) -> str:
    """Return a row's settings in words."""
    return ", ".join(f"{key}={value}" for key, value in row.get("settings", {}).items()) or "default settings"


def tensor_parallel_step(data: dict[str, Any]) -> list[str]:
    """Seconds of a training step on one device and split over several, and how far their losses differ."""
    lines = [
        f"## A training step split over devices ({data['size']}, {data['batch']} x {data['block']:,} tokens, weights "
        f"and states in bfloat16, {data['machine']['device']})",
        "",
        "| | devices | activations kept | step, s | tokens/s | of one device | peak, GB a device | loss, last step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone = {(row["form"], sitting_of(row)): row for row in data["rows"] if row["devices"] == 1}
    sittings = any(sitting_of(row) for row in data["rows"])
    if sittings:
        lines[-2:] = [lines[-2] + " sitting |", lines[-1] + "---|"]
    for row in data["rows"]:
        one = alone[row["form"], sitting_of(row)]
        name = row["form"] + (", sequence parallel" if row["sequence_parallel"] else "")
        kept = {"none": "all", "selective": "products and attention", "full": "inputs of blocks"}[
            row["checkpointing"]
        ]
        peak = f"{row['peak_allocated_bytes'] / 1e9:.1f}" if "peak_allocated_bytes" in row else ""
        lines.append(
            f"| {name} | {row['devices']} | {kept} | {row['step_s']:.3f} | {row['tokens_per_s']:,.0f} "
            f"| {one['step_s'] / row['step_s']:.2f}x | {peak} | {row['losses'][-1]:.5f} |"
            + (f" {sitting_of(row)} |" if sittings else "")
        )
    apart = max(
        abs(ours - theirs)
        for row in data["rows"]
        for ours, theirs in zip(row["losses"], alone[row["form"], sitting_of(row)]["losses"], strict=True)
    )
    return [
        *lines,
        "",
        f"Largest difference of a step's loss from one device's: {apart:.1e}. Must: faster than one device, by the "
        f"best row of a form: {'; '.join(_faster(data, alone))}.",
    ]


def _faster(data: dict[str, Any], alone: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    """Whether the fastest split row of every form is faster than one device in its sitting."""
    said = []
    for form in dict.fromkeys(row["form"] for row in data["rows"] if row["devices"] > 1):
        split = [row for row in data["rows"] if row["form"] == form and row["devices"] > 1]
        gain = max(alone[form, sitting_of(row)]["step_s"] / row["step_s"] for row in split)
        said.append(f"{form} {gain:.2f}x, {'met' if gain > 1 else '**missed**'}")
    return said
