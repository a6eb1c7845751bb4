"""Section of the benchmarks page about decode attention, and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MUST = {"q8_0": 0.78, "q4_0": 0.60, "nf4": 0.55, "mixed": 0.60}
LARGE = 100e6  # bytes from which the quantised formats' shares hold
STEADY = 30e6  # bytes from which bf16's time does
TICKS = 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10  # TB/s
ON_RECORD = {"NVIDIA H200": 4.48e12}
"""Read roofs of devices. A machine on which a plain reduction reads less, while decode attention reads more than that,
is compared with the read bandwidth on record."""


def roof_of(data: dict[str, Any]) -> float:
    """Return the bytes per second that shares and musts are of."""
    return max(data["read_roof_bytes_per_s"], ON_RECORD.get(data["machine"].get("device", ""), 0.0))


def decode(data: dict[str, Any]) -> list[str]:
    """Time, share of the roof, peers and error by layout, format and shape."""
    roof, measured = roof_of(data), data["read_roof_bytes_per_s"]
    held = [row["steps_of_a_graph"] for row in data["rows"] if "steps_of_a_graph" in row]
    graphs = f"graphs of {min(held)} to {max(held)} steps" if held else "graph replays"
    older = len(data["rows"]) - len(held)
    if held and older:  # a replay waits some 12 us before its first kernel, which several steps share
        graphs += f" ({older} older rows: of one step, its wait included)"
    is_plain = all(row["layout"].startswith("one part") for row in data["rows"])
    lines = [
        f"## Decode attention on {'quantised caches of plain attention' if is_plain else 'stored formats'}",
        "",
        f"One query per sequence, bf16, cold caches, {graphs}, interleaved. Read roof: {roof / 1e12:.2f} TB/s"
        + (
            "."
            if roof == measured
            else f", as on record (a reduction read {measured / 1e12:.2f} TB/s next to this run)."
        ),
        "",
        f"![Bytes per second against bytes read](benchmarks/{data.get('plot', 'decode.png')})",
        "",
        "| layout | format | batch x tokens | MB useful (padded) | us, median (middle 60%) | of the roof | must |"
        " over the best stock backend | error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        peer = f"**{row['over_peer']:.2f}x** {row['best_peer']}" if "over_peer" in row else ""
        lines.append(
            f"| {row['layout']} | {row['format']} | {row['batch']} x {row['tokens']} |"
            f" {row['useful_bytes'] / 1e6:.1f} ({row['padded_bytes'] / 1e6:.1f}) | {row['median_us']:.1f}"
            f" ({row['p20_us']:.1f} to {row['p80_us']:.1f}) | {100 * roof_share(row, roof):.0f}%"
            f" | {said_must(row, roof)} |"
            f" {peer} | {row['relative_error']:.1e} |"
        )
    if data["left_out"]:
        lines += ["", f"Left out: {'; '.join(data['left_out'])}."]
    return [
        *lines,
        "",
        "Useful bytes are codes and scales of every stored token, read once. Errors are relative to float64 attention"
        " on the dequantised tokens."
        + ("" if is_plain else " Stock backends read keys that are concatenated already."),
    ]


def roof_share(row: dict[str, Any], roof: float) -> float:
    """Return the share of a roof that a row's useful bytes reach."""
    return row["useful_bytes"] / row["median_us"] * 1e6 / roof


def said_must(row: dict[str, Any], roof: float) -> str:
    """Return what a row has to reach and whether it does."""
    if row["format"] == "bf16" and row["useful_bytes"] >= STEADY:
        limit = row["useful_bytes"] / (0.9 * roof) * 1e6 + 10
        return f"{limit:.1f} us: {'met' if row['median_us'] <= limit else 'missed'}"
    share = MUST.get(row["format"])
    if share is None or row["useful_bytes"] < LARGE:
        return ""
    return f"{100 * share:.0f}%: {'met' if roof_share(row, roof) >= share else 'missed'}"


def plot(data: dict[str, Any], file: Path) -> None:
    """Draw bytes per second over bytes read, a colour a format and a marker a layout, under the roof."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    layouts = list(dict.fromkeys(row["layout"] for row in data["rows"]))
    formats = list(dict.fromkeys(row["format"] for row in data["rows"]))
    for i, layout in enumerate(layouts):
        for j, form in enumerate(formats):
            rows = [row for row in data["rows"] if (row["layout"], row["format"]) == (layout, form)]
            axes.scatter(
                [row["useful_bytes"] / 1e6 for row in rows],
                [row["useful_bytes"] / row["median_us"] / 1e6 for row in rows],
                marker="os^D"[i % 4],
                color=f"C{j}",
                label=f"{layout}, {form}",
            )
    if data["read_roof_bytes_per_s"]:
        axes.axhline(roof_of(data) / 1e12, color="black", linestyle="--", label="read roof")
    axes.set(xscale="log", yscale="log", xlabel="MB read", ylabel="TB/s")
    low, high = axes.get_ylim()
    axes.set_yticks([x for x in TICKS if low <= x <= high])
    axes.yaxis.set_minor_formatter("")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend(fontsize=6, ncols=2)
    figure.savefig(file, dpi=150)
    plt.close(figure)
