"""The short form of scripts/faults/compile_launch.py: compile refuses random manifests exactly where launch does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "faults" / "compile_launch.py"


def test_compile_refuses_random_manifests_iff_launch_does(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    words = [sys.executable, str(SCRIPT), "--seed", "3", "--count", "6", "--json", str(output)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert 0 < result["refused"] < result["count"] == 6, "both kinds were seen"
    assert (result["failed"], result["differ"]) == (0, [])
