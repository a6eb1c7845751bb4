"""The short form of scripts/faults/compile_launch.py: compile refuses random manifests exactly where launch does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.integration.commands import caramba

ROOT = Path(__file__).parents[2]


def test_compile_refuses_random_manifests_iff_launch_does(tmp_path: Path, cache: Path) -> None:
    output = tmp_path / "result.json"
    words = ["--seed", "3", "--count", "6", "--jobs", "1", "--json", str(output)]
    done = caramba(words, ROOT, cache, module="scripts.faults.compile_launch")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert 0 < result["refused"] < result["count"] == 6, "both kinds were seen"
    assert (result["failed"], result["differ"]) == (0, [])
