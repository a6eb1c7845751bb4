"""A few kills and signals at random points; scripts/faults/kill.py sends many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults" / "kill.py"


def test_kill_random_points_leave_equal_weights_and_no_files(tmp_path: Path) -> None:
    words = ["--seed", "3", "--count", "2", "--signals", "2", "--only", "resume"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words, "--json", str(tmp_path / "result.json")],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert sum(result["sent"].values()) >= 4
    assert result["comparisons"] >= 1
    assert (result["leftovers"], result["unequal"], result["failed"], result["steps_lost"]) == ([], [], [], 0)
