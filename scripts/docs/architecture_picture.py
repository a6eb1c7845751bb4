"""Picture and table of the packages, from the import contracts in pyproject.toml and the packages' docstrings."""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

from markdown_cells import cell, code, table

ROOT = Path(__file__).resolve().parents[2]
LETTER, BOX, ROW, GAP = 7.4, 30, 44, 10


def layers() -> list[list[str]]:
    """Return the rows of packages of the contract `layers`, highest first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (item for item in contracts if item["id"] == "layers")
    return [[name.strip(" ()") for name in row.replace("|", ":").split(":")] for row in contract["layers"]]


def torch_free() -> set[str]:
    """Return the packages that never load torch."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (item for item in contracts if item["id"] == "torch-free")
    return {name.removeprefix("caramba.") for name in contract["source_modules"]}


def picture() -> str:
    """Return the picture as SVG: one line of boxes for each row of the contract."""
    rows, free = layers(), torch_free()
    width = max(sum(_width(name) + GAP for name in row) for row in rows) + 2 * GAP
    shapes = []
    for number, row in enumerate(rows):
        x = (width - sum(_width(name) + GAP for name in row) + GAP) / 2
        y = GAP + number * ROW
        for name in row:
            fill, line = ("#e0f2f1", "#00796b") if name in free else ("#fff3e0", "#ef6c00")
            shapes.append(
                f'<rect x="{x:.0f}" y="{y}" width="{_width(name):.0f}" height="{BOX}" rx="5" '
                f'fill="{fill}" stroke="{line}"/>'
                f'<text x="{x + _width(name) / 2:.0f}" y="{y + 20}" text-anchor="middle">{escape(name)}</text>'
            )
            x += _width(name) + GAP
    height = GAP + len(rows) * ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" '
        'font-family="sans-serif" font-size="13"><title>Packages of caramba by layer</title>'
        f'<rect width="{width:.0f}" height="{height}" fill="#ffffff"/>{"".join(shapes)}</svg>\n'
    )


def package_table() -> str:
    """Return a table of the packages with the first sentence of each docstring."""
    rows = []
    for name in (name for row in layers() for name in row):
        sentence = _sentence(name)
        rows.append([code(name), "no" if name in torch_free() else "yes", cell(sentence)])
    return "\n".join(table(["package", "may load torch", "content"], rows))


def _sentence(name: str) -> str:
    place = ROOT / "src" / "caramba" / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    return text.split("\n\n")[0].replace("\n", " ")


def _width(name: str) -> float:
    return len(name) * LETTER + 24
