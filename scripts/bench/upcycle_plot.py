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
    figure, axis = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
    methods: dict[str, list[tuple[float, float]]] = {}
    for row in data["untrained"]:
        if row["method"] != "random":
            methods.setdefault(row["method"], []).append((row["kv_ratio"], row["ppl_ratio"]))
    names = {
        "dba": "dba",
        "fitted": "dba, widths by layer",
        "weight_svd": "weight SVD",
        "copy": "pooled KV heads",
    }
    for method, points in methods.items():
        points.sort()
        axis.plot(*zip(*points, strict=True), "o--", ms=4, lw=1, label=f"untrained: {names[method]}")
    trained: dict[str, list[tuple[float, float]]] = {}
    for run in data["distilled"]:
        after = run["phases"]["global"]["after"]
        short = " in under 20M tokens" if run["share"] < 1 else ""
        trained.setdefault(f"distilled{short}: {names[run['method']]}", []).append(
            (after["kv_ratio"], after["ppl_ratio"])
        )
    for (label, points), marker in zip(trained.items(), "s^vD*", strict=False):
        points.sort()
        axis.plot(*zip(*points, strict=True), marker, ms=7, label=label)
    axis.axhline(1.0, color="0.6", lw=0.8)
    axis.set(
        xscale="log", yscale="log", xlabel="KV ratio at 16 bits", ylabel="perplexity ratio to the teacher"
    )
    ticks = sorted({round(x, 2) for points in methods.values() for x, _ in points})
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], rotation=45)
    axis.minorticks_off()
    shown = [1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0]
    axis.set_yticks(shown, [f"{tick:g}" for tick in shown])
    axis.set_title("Proxy: teacher trained on local source code", fontsize=9)
    axis.legend(fontsize=7)
    with whole_file(source.with_suffix(".png")) as temporary:
        figure.savefig(temporary, dpi=150, format="png")


if __name__ == "__main__":
    main()
