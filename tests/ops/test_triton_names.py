"""Kernels use no name that the oldest Triton they are for lacks: this machine has a newer one."""

from __future__ import annotations

import ast
import re
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


def test_files_of_tests_that_need_triton_are_skipped_without_it() -> None:
    """Else `pytest -m mps tests/ops` ends on a Mac before a test runs."""
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        text = file.read_text()
        needs = re.search(r"(?m)^(import triton|from (triton|caramba\.kernels\.triton)\b)", text)
        guard = text.find('pytest.importorskip("triton")')
        assert needs is None or -1 < guard < needs.start(), file.name
