"""A few damaged artifacts; scripts/faults/bitflip.py damages many."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.faults import bitflip


def test_damaged_artifacts_of_a_run_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    result = bitflip.damage(5, 40, 5, tmp_path)
    assert result["wrong"] == 0, result["examples"]
    assert (result["flips"], result["copies"]) == (40, 5)
    assert result["checkpoint removed"] + result["checkpoint swapped"] == 5
