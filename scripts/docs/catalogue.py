"""Reference pages of the files of a run and of metric keys, from catalogue.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from markdown_cells import cell, code, heading, table

FILE = Path(__file__).with_name("catalogue.toml")
NAME = re.compile(r"\{[A-Z]+\}")


def read() -> dict[str, dict[str, Any]]:
    """Return the catalogue: {section: {pattern: meaning}}."""
    return tomllib.loads(FILE.read_text())


def matching(section: str, text: str) -> list[str]:
    """Return the patterns of a section that a name matches."""
    return [pattern for pattern in read()[section] if re.fullmatch(expression(pattern), text)]


def expression(pattern: str) -> str:
    """Return a pattern as a regular expression; only {CONDITIONS} may contain `@`, and only {KIND} may be empty."""
    parts = NAME.split(pattern)
    kinds = {"{KIND}": "([^@]*)", "{CONDITIONS}": "(.+)"}
    names = [kinds.get(name, "([^@]+)") for name in NAME.findall(pattern)]
    return "".join(re.escape(part) + name for part, name in zip(parts, [*names, ""], strict=True))


def files() -> str:
    """Return the page of files and of the columns of metrics.csv."""
    found = read()
    lines = ["# Files of a run", "", "A run has a folder of its own, `runs/NAME/TIME-HASH/`.", ""]
    for section, title in (
        ("run", "Folder"),
        ("artifacts", "artifacts/"),
        ("columns", "Columns of metrics.csv"),
    ):
        rows = [[code(name), cell(text)] for name, text in found[section].items()]
        lines += [*heading(title, section), *table(["name", "content"], rows)]
    return "\n".join(lines)


def metrics() -> str:
    """Return the page of metric keys."""
    families: dict[str, list[list[str]]] = {}
    for pattern, (unit, text) in read()["metrics"].items():
        families.setdefault(pattern.partition(".")[0], []).append([code(pattern), unit, cell(text)])
    lines = [
        "# Metric keys",
        "",
        "A key is `FAMILY.MODEL.FIELD@CONDITIONS`. Each metric has a value, a unit, `n` and a standard deviation. "
        "`caramba collect SWEEP --metric KEY` selects by key.",
        "",
        "A second benchmark of the same type adds `bench=ID` to its conditions, a verification of an earlier run "
        "`run=ID`. A benchmark with a cache format adds `kind=FORMAT`.",
        "",
    ]
    for family, rows in families.items():
        lines += [*heading(family, family), *table(["key", "unit", "meaning"], rows)]
    return "\n".join(lines)
