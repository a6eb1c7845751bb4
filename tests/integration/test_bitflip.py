"""A few damaged artifacts; scripts/faults/bitflip.py damages many."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.commands import caramba

ROOT = Path(__file__).parents[2]


def test_damaged_artifacts_of_a_run_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    found = tmp_path / "found.json"
    words = ["--seed", "5", "--count", "40", "--copies", "5", "--jobs", "1", "--json", str(found)]
    done = caramba(words, ROOT, cache, module="scripts.faults.bitflip")
    assert found.is_file(), done.stderr
    result = json.loads(found.read_text())
    assert (done.returncode, result["wrong"]) == (0, 0), result["examples"]
    assert (result["flips"], result["copies"]) == (40, 5)
    assert result["checkpoint removed"] + result["checkpoint swapped"] == 5
