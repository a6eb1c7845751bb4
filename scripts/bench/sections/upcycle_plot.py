"""Draw perplexity ratio against KV ratio from the proxy study's JSON.

Usage: python scripts/bench/upcycle_plot.py [docs/benchmarks/upcycle_proxy.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

from caramba.runs.files import whole_file

mpl.use("Agg")


def main() -> None:
    source = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/benchmarks/upcycle_proxy.json")
    data = json.loads(source.read_text())
    figure, axis = plt.subplots(figsize=(8.0, 4.2), layout="constrained")
    names = {
        "dba": "dba",
        "fitted": "dba, widths by layer",
        "weight_svd": "weight SVD",
        "copy": "pooled KV heads",
    }
    colours = dict(zip(names, ("C0", "C1", "C2", "C3"), strict=True))
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in data["untrained"]:
        if row["method"] in names and not row.get("spread"):
            key = ("untrained: " + names[row["method"]], colours[row["method"]], "o--")
            points.setdefault(key, []).append((row["kv_ratio"], row["ppl_ratio"] - 1))
    most = max(run["tokens"] for run in data["distilled"])
    for run in data["distilled"]:
        if run["method"] not in names:  # the teacher trained further has no ratio of its own
            continue
        after, marker = run["phases"]["global"]["after"], "^" if run["tokens"] < 0.9 * most else "s"
        tokens = f"distilled, {run['tokens'] / 1e6:.0f}M tokens: "
        key = (tokens + names[run["method"]], colours[run["method"]], marker)
        points.setdefault(key, []).append((after["kv_ratio"], after["ppl_ratio"] - 1))
    for (label, colour, style), values in points.items():
        axis.plot(*zip(*sorted(values), strict=True), style, color=colour, ms=5, lw=1, label=label)
    budgets = [
        round(data["teacher"]["cache_elements"] / sum(widths), 2) for widths in data["budgets"].values()
    ]
    axis.set(xscale="log", xlabel="KV ratio at 16 bits, counted from tensors")
    # Linear around 0, since a student trained on may be as good as its teacher or better.
    axis.set_yscale("symlog", linthresh=0.01)
    axis.set_ylim(bottom=min(-0.005, 1.5 * min(y for values in points.values() for _, y in values)))
    axis.axhline(0.0, lw=0.8, color="0.4")
    axis.set_ylabel("perplexity over the teacher's, minus 1")
    axis.set_xticks(budgets, [f"{budget:g}x" for budget in budgets])
    axis.minorticks_off()
    axis.grid(axis="y", lw=0.4, color="0.85")
    axis.set_title("Proxy: 87M-parameter teacher trained on local source code", fontsize=10)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    with whole_file(source.with_suffix(".png")) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
