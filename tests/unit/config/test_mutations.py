"""Mutated manifests are accepted or refused as a user's mistake: a short run of scripts/faults/mutate.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
N_CASES = 50


@pytest.fixture(scope="module")
def mutations() -> Any:
    sys.path.insert(0, str(ROOT / "scripts" / "faults"))
    try:
        import mutate  # pyright: ignore[reportMissingImports]
    finally:
        sys.path.pop(0)
    return mutate


def test_mutate_finds_no_fault_and_reaches_both_ends(mutations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutations, "CPU_S", 20.0)  # CPU seconds grow with what else runs on a core
    result = mutations.mutate(seed=21, first=0, count=N_CASES)
    assert result["faults"] == []
    assert result["accepted"] + result["refused"] == result["count"] == N_CASES
    assert result["accepted"] > 1, "how many of one seed are valid moves with each key that is added"
    assert result["refused"] > 30


def test_mutate_counts_a_crash_and_a_slow_case_as_faults(
    mutations: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compile_case(case: Any, folder: Path) -> None:
        if len(case.text) % 2:
            raise TypeError("x")
        while True:
            pass

    monkeypatch.setattr(mutations, "compile_case", compile_case)
    monkeypatch.setattr(mutations, "CPU_S", 0.05)
    result = mutations.mutate(seed=1, first=0, count=6)
    assert result["n_faults"] == 6
    assert result["fault_kinds"].keys() <= {"TypeError at test_mutations.py:compile_case", "slow"}
