"""A few kills and signals at random points; scripts/faults/kill.py sends many."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.commands import caramba

ROOT = Path(__file__).parents[2]


def test_kill_random_points_leave_equal_weights_and_no_files(tmp_path: Path, cache: Path) -> None:
    output = tmp_path / "result.json"
    words = ["--seed", "3", "--count", "2", "--signals", "2", "--only", "resume", "--json", str(output)]
    done = caramba(words, ROOT, cache, module="scripts.faults.kill")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert sum(result["sent"].values()) >= 4
    assert result["comparisons"] >= 1
    assert (result["leftovers"], result["unequal"], result["failed"], result["steps_lost"]) == ([], [], [], 0)
