"""The bench of batching runs through on any machine and its section renders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_tiny_bench_measures_both_ways_of_batching(tmp_path: Path) -> None:
    out = tmp_path / "batching.json"
    command = [
        *(
            "scripts/bench/batching.py",
            "--device",
            "cpu",
            "--model",
            "tiny",
            "--slots",
            "4",
            "--requests",
            "6",
        ),
        *("--prompt", "4,12", "--new", "2,16", "--batch-prompt", "4", "--batch-new", "8", "--chunks", "16"),
        *("--itl-ms", "60000", "--rate", "1000", "--repeats", "1", "--out", str(out)),
    ]
    done = subprocess.run(
        [sys.executable, *command, "--seconds", "0.001"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "4 sides left" in done.stdout
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    assert [row["way"] for row in data["arrivals"]] == ["static", "continuous, 16 prompt tokens a step"]
    assert all(
        0 < row["itl_p50_ms"] <= row["itl_p99_ms"] and row["ttft_p50_ms"] > 0 for row in data["arrivals"]
    )
    assert [row["at_once"] for row in data["batch"]] == [1, 4]
    assert min(data["over_static"], data["over_one_at_a_time"]) > 0
    static, continuous = data["arrivals"]
    *others, widest = data["at_equal_p99"]
    assert widest == {
        "itl_p99_within_ms": 60000,
        "way": continuous["way"],
        "static_is_within": True,
        "over_static": data["over_static"],
    }
    assert data["over_static"] == continuous["tokens_per_s"] / static["tokens_per_s"]
    assert data["itl_p99_is_equal"] is True
    (strict,) = [row for row in others if row["itl_p99_within_ms"] == static["itl_p99_ms"]]
    assert (strict["over_static"] is None) == (continuous["itl_p99_ms"] > static["itl_p99_ms"])
    program = (
        "import json,sys,report; print('\\n'.join(report.SECTIONS['batching'](json.load(open(sys.argv[1])))))"
    )
    page = subprocess.run(
        [sys.executable, "-c", program, str(out)],
        cwd=ROOT / "scripts/bench",
        capture_output=True,
        text=True,
    )
    assert page.returncode == 0, page.stderr
    assert "| static | eager |" in page.stdout
    assert "At other bounds of that time:" in page.stdout
    assert f"**{data['over_static']:.2f}x** the throughput" in page.stdout
