"""Put tables of optimisers on record: optimizers.json of runs with one setting becomes a benchmark's JSON and plot.

Usage: python scripts/bench/optimizer_record.py RUN... --out docs/benchmarks/NAME.json --model TEXT [--note TEXT]

Several runs are one table whose rows were measured separately: each has AdamW's row, with the same losses. The plot is
NAME.png, and the rows of a Markdown table are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from caramba.artifacts.optimizers import draw_rows
from caramba.runs.files import write_json

Row = dict[str, Any]
OWN = ("rows", "seconds")
"""Settings that runs of one table may have of their own."""


def settings_of(table: Row) -> Row:
    return {key: value for key, value in table["settings"].items() if key not in OWN}


def join_tables(tables: list[Row]) -> list[Row]:
    """Return the rows of all tables, each once, AdamW's first.

    Raises:
        ValueError: they have other settings, or AdamW's losses differ.
    """
    first, found = tables[0], {row["row"]: row for row in tables[0]["rows"]}
    for other in tables[1:]:
        if settings_of(other) != settings_of(first):
            raise ValueError("runs of one table: their settings differ; give runs of one command but for its rows")
        for row in other["rows"]:
            if row["row"] == "adamw":
                ours, theirs = ([run["loss"] for run in one["runs"]] for one in (found["adamw"], row))
                if ours != theirs:
                    raise ValueError(
                        f"runs of one table: AdamW's losses are {ours} and {theirs}; run them on one machine"
                    )
            else:
                found.setdefault(row["row"], row)
    return list(found.values())


def machine_of(run: Path) -> Row:
    """Return what figures depend on, from a run's env.json."""
    facts = json.loads((run / "env.json").read_text())
    gpus = [gpu["name"] if isinstance(gpu, dict) else str(gpu) for gpu in facts["gpus"]]
    device = gpus[0] if gpus else facts["machine"]
    return {"device": device, "torch": facts["packages"]["torch"], "python": facts["python"]} | (
        {"commit": facts["git_commit"]} if facts.get("git_commit") else {}
    )


def command_of(run: Path) -> str:
    return " ".join(["caramba launch", *(run / "overrides.txt").read_text().split()])


def interval(difference: Row | None) -> str:
    if difference is None or difference["low"] == difference["high"]:
        return ""
    return f"{difference['mean']:+.3f} ({difference['low']:+.3f} to {difference['high']:+.3f})"


def without_curves(row: Row) -> Row:
    """Return a row without the curves of its runs, which the plot has."""
    runs = [{key: value for key, value in run.items() if key != "curve"} for run in row.get("runs", [])]
    return {**row, "runs": runs} if runs else row


def lines_of(rows: list[Row]) -> list[str]:
    """Return the lines of a Markdown table."""
    heads = ("optimiser", "lr found", "held-out loss", "equal tokens", "equal time", "seconds", "tokens of trials")
    found = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        if row["skipped"] is not None:
            continue
        edge = " (edge)" if row["is_edge"] else ""
        cells = (
            row["row"],
            f"{row['lr']:.3g}{edge}",
            f"{row['val_loss']:.3f} ± {row['val_loss_deviation']:.3f}",
            interval(row["loss_difference"]),
            interval(row.get("loss_difference_at_equal_time")),
            f"{row['seconds']:.1f}",
            f"{row['trial_tokens']:,}",
        )
        found.append("| " + " | ".join(cells) + " |")
    return found


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True, help="what was trained, in words")
    parser.add_argument("--note", help="what else the seconds depend on")
    given = parser.parse_args(words)
    tables = [json.loads((run / "optimizers.json").read_text()) for run in given.runs]
    rows = join_tables(tables)
    machine = machine_of(given.runs[0]) | ({"note": given.note} if given.note else {})
    made_by = [command_of(run) for run in given.runs]
    head = {"benchmark": "optimizers", "made_by": made_by[0] if len(made_by) == 1 else made_by, "machine": machine}
    kept = [without_curves(row) for row in rows]
    settings = {**tables[0]["settings"], "rows": [row["row"] for row in rows]}
    write_json(given.out, {**head, "model": given.model, "settings": settings, "rows": kept})
    measured = [row for row in rows if row["skipped"] is None]
    given.out.with_suffix(".png").write_bytes(draw_rows(measured, {}).png)
    print("\n".join(lines_of(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
