"""Kernels use no name that the oldest Triton they are for lacks: this machine has a newer one."""

from __future__ import annotations

import ast
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels" / "triton"
# Of `triton.language` 3.5.1, which pyproject.toml allows.
NAMES = frozenset(Path(__file__).with_name("triton_3_5_names.txt").read_text().split())


def used(file: Path) -> set[str]:
    """Names that a file takes from `triton.language`, which kernels call `tl`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl"
    }


def test_names_are_of_the_oldest_triton() -> None:
    found = {file.name: used(file) for file in sorted(KERNELS.glob("*.py"))}
    assert {"load", "store", "dot"} <= set().union(*found.values())
    assert "to_tensor" not in NAMES, "3.5 has it in `triton.language.core`"
    lacking = {name: sorted(names - NAMES) for name, names in found.items() if names - NAMES}
    assert not lacking
