"""A search for a standard term finds the module that implements it: the term is in a module's first comment."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Term, and what the path of the module must contain.
TERMS = {
    "stochastic rounding": "stochastic_round",
    "GEMV": "gemv",
    "fused QKV": "lower/fuse",
    "rotary embedding": "rope",
    "slot cache": "cache/",
    "continuous batching": "infer/engine",
    "speculative decoding": "infer/",
    "gradient checkpointing": "checkpointing",
    "loss scaling": "train/strategies",
    "prefix cache": "infer/engine",
    "autotune": "tune",
}


def module_docstrings() -> dict[str, str]:
    files = [file for folder in ("src/caramba", "kernels") for file in (ROOT / folder).rglob("*.py")]
    return {
        str(file.relative_to(ROOT)): " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split())
        for file in files
    }


@pytest.fixture(name="docstrings", scope="module")
def _docstrings() -> dict[str, str]:
    return module_docstrings()


@pytest.mark.parametrize(("term", "place"), TERMS.items())
def test_standard_term_is_in_the_docstring_of_its_module(docstrings: dict[str, str], term: str, place: str) -> None:
    found = [path for path, text in docstrings.items() if re.search(term, text, re.IGNORECASE)]
    assert any(place in path for path in found), f"{term}: no module docstring under *{place}*; found {found}"
