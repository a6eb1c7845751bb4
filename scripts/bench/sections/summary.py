"""The short summary at the top of docs/benchmarks.md, each figure from the JSON that its row names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sections.scaling import share_of_linear


def summary(folder: Path) -> list[str]:
    """Return a table of the main figures."""
    rows = [f"| {what} | {value} | `{name}.json` |" for name, what, value in _figures(folder)]
    return ["| what | measured | source |", "|---|---|---|", *rows]


def _figures(folder: Path) -> list[tuple[str, str, str]]:
    def read(name: str) -> dict[str, Any]:
        return json.loads((folder / f"{name}.json").read_text())

    smollm2 = read("smollm2")
    best = smollm2["students"][0]
    training = read("training")["parts"]["bf16 8x2048"]["rows"]
    ours, theirs = (training[name]["tokens_per_s"] for name in ("caramba", "transformers"))
    scaling = read("scaling")
    ddp = max(
        share_of_linear(scaling, row) or 0
        for row in scaling["rows"]
        if (row["strategy"], row["devices"]) == ("ddp", 4)
    )
    ladder = {item["what"]: item["got"] for item in read("ladder")["musts"]}
    decode = next(row for row in read("inference")["rows"] if row["side"] == "captured")
    commands = {item["command"]: item["median_s"] for item in read("launch_times")["commands"]}
    plan = next(command for command in commands if command.startswith("caramba compile"))
    return [
        (
            "smollm2",
            f"perplexity ratio at {best['bytes_ratio']}x fewer cached bytes (SmolLM2-135M, held-out encyclopedia)",
            f"{best['text']['heldout_2048']['ratio']:.3f}",
        ),
        (
            "training",
            "training of a 1B model on one H200",
            f"{ours:,.0f} tokens/s, {ours / theirs:.2f}x transformers",
        ),
        ("ladder", "training ladder, fastest row over row 0", f"{ladder['speed over row 0']:.1f}x"),
        ("scaling", "pretraining of a 1B model by ddp on four H200", f"{ddp:.1%} of linear"),
        ("inference", f"decode of a 1B model, {decode['case']}", f"{decode['tok_s']:,.0f} tokens/s"),
        ("batching", "serving under load, over static batching", f"{read('batching')['over_static']:.2f}x"),
        ("launch_times", f"`{plan}`", f"{commands[plan]:.2f} s"),
        (
            "lightning_overhead",
            "cost of Lightning and all callbacks, of a step",
            f"{100 * read('lightning_overhead')['overhead']['median']:.2f}%",
        ),
    ]
