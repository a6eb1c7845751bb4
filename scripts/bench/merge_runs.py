"""Files that one script wrote in several sittings put into one: every row names its commit and its sitting.

Machines that are lent differ by a few percent from day to day, and so do commits: what one device does is the base of
rows of the same sitting alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

OWN = ("rows", "must", "plot", "left_out")
"""Keys that each file has for itself."""


def merge_sittings(named: Iterable[str]) -> dict[str, Any]:
    """Return the rows of files of one script, machine and shape under one head.

    A file is named by its path, or as `FILE:single,fsdp2` for the rows of some strategies. Its sitting is its
    `machine.sitting`, else its `machine.commit`; files that name neither are of one sitting.

    Raises:
        ValueError: A file is of another machine or shape than the first.
    """
    first: dict[str, Any] | None = None
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    for word in named:
        name, _, strategies = word.partition(":")
        data = json.loads(Path(name).read_text())
        head, made = _head(data), _made(data["machine"])
        first = first or head
        if head != first:
            raise ValueError(f"{name} is of another machine or shape than the first file")
        wanted = strategies.split(",") if strategies else None
        left_out += data.get("left_out", [])
        rows += [made | row for row in data["rows"] if wanted is None or row["strategy"] in wanted]
    if first is None:
        raise ValueError("no files to merge")
    commits = dict.fromkeys(row["commit"] for row in rows if "commit" in row)
    machine = first["machine"] | ({"commit": ", ".join(commits)} if commits else {})
    return {**first, "machine": machine, "rows": rows, **({"left_out": left_out} if left_out else {})}


def _head(data: dict[str, Any]) -> dict[str, Any]:
    machine = {key: value for key, value in data["machine"].items() if key not in ("commit", "sitting")}
    return {key: value for key, value in data.items() if key not in OWN} | {"machine": machine}


def _made(machine: dict[str, Any]) -> dict[str, str]:
    made = {key: machine[key] for key in ("commit", "sitting") if key in machine}
    return {"sitting": made["commit"], **made} if "commit" in made else made
