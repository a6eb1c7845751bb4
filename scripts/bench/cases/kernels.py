"""Time of caramba's kernels against torch in eager and torch.compile, bf16, against a copy. Writes JSON and PNG.

Sides run in turns as replays of CUDA graphs over sets of tensors larger than the cache, all results kept. The roof of a
row is a copy of as many bytes in the same turns. Errors are against float64.

Usage on a GPU: python scripts/bench/run.py kernels [--seconds 240] [--only rms_norm,rope] [--out FILE]
On any machine: python scripts/bench/run.py kernels --size tiny --seconds 5 --no-compile --out /tmp/kernels.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from cases import kernels_elementwise
from cases.kernel_case import measure
from record import Record, machine_facts
from registry import UsageError
from torch._functorch import config as functorch_config

from caramba import kernels

BUILDERS = (kernels_elementwise.cases,)
TINY_ROWS = 32
COLOURS = {"ours": "#0072b2", "eager": "#999999", "compiled": "#e69f00"}


def told(row: dict[str, Any]) -> str:
    sides = ", ".join(
        f"{name} {side['median_us']:.1f} us {100 * side['of_copy']:.0f}%"
        + ("" if side["error"] is None else f" (error {side['error']:.1e})")
        for name, side in row["sides"].items()
    )
    verdict = "ok  " if row["sides"]["ours"]["of_copy"] >= row["must"] else "MISS"
    late = "" if row["host_us"] <= row["host_must_us"] else " MISS"
    host = f", host {row['host_us']:.1f} us of {row['host_must_us']:.0f}{late}"
    return (
        f"{verdict} {row['name']:22s} {row['pass']:8s} [{row['implementation']}] copy {row['copy_tb_s']:.2f} TB/s; "
        f"{sides}{host}"
    )


def plot(rows: list[dict[str, Any]], path: Path, device: str) -> None:
    """Draw each row's bandwidth by side below the roof of a copy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 0.42 * len(rows) + 1.4), layout="constrained")
    names = [f"{row['name']}, {row['pass']}" for row in rows]
    for at, (side, colour) in enumerate(COLOURS.items()):
        shown = [(y, row) for y, row in enumerate(rows) if side in row["sides"]]
        if not shown:
            continue
        axes.barh(
            [y + 0.27 * (at - 1) for y, _ in shown],
            [100 * row["sides"][side]["of_copy"] for _, row in shown],
            height=0.25,
            color=colour,
            label=side,
        )
    for y, row in enumerate(rows):
        axes.plot([100 * row["must"]] * 2, [y - 0.42, y + 0.42], color="black", linewidth=1)
    axes.axvline(100, color="#d55e00", linestyle="--", linewidth=1, label="roof: a copy")
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"useful bytes a second, % of a copy's, on {device} (black: must)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="full", choices=("full", "tiny"))
    parser.add_argument("--seconds", type=float, default=240.0, help="of timing, over all rows")
    parser.add_argument("--only", help="names of ops, with commas")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")


def run(options: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.size == "full" and device.type == "cpu":
        raise UsageError("--size full needs a CUDA device; use --size tiny here")
    kernels.load(device)
    # A captured backward runs again on the same tensors.
    functorch_config.donated_buffer = False
    torch.manual_seed(0)
    cases = [case for build in BUILDERS for case in build(device, torch.bfloat16)]
    if options.only is not None:
        wanted = options.only.split(",")
        if unknown := set(wanted) - {case.op for case in cases}:
            raise UsageError(
                f"--only: {', '.join(sorted(unknown))} unknown; expected {', '.join({c.op for c in cases})}"
            )
        cases = [case for case in cases if case.op in wanted]
    work = [
        (case, back) for case in cases for back in (False, True) if not back or case.backward_bytes_per_row
    ]
    rows = []
    for case, is_backward in work:
        n_rows = case.rows if options.size == "full" else min(case.rows, TINY_ROWS if case.rows > 64 else 1)
        rows.append(
            measure(case, n_rows, is_backward, not options.no_compile, options.seconds / len(work), device)
        )
        print(told(rows[-1]), flush=True)
    facts = machine_facts(device)
    record.write_data(
        {
            **record.head(facts),
            "size": options.size,
            "rows": rows,
        },
    )
    plot(rows, options.out.with_suffix(".png"), facts["device"])
    return 0
