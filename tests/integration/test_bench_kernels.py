"""The bench of kernels runs through on any machine and its section renders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_tiny_bench_writes_rows_errors_and_a_plot(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    command = [
        *("scripts/bench/run.py", "kernels", "--size", "tiny", "--seconds", "1", "--no-compile"),
        *("--only", "rope,swiglu,lion_step,norm_dropout_activation", "--out", str(out)),
    ]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(out.read_text())
    names = [(row["name"], row["pass"]) for row in data["rows"]]
    assert names == [
        *(("rope", "forward"), ("rope", "backward"), ("swiglu", "forward"), ("swiglu", "backward")),
        *(("norm, dropout, gelu", "forward"), ("norm, dropout, gelu", "backward"), ("lion", "forward")),
    ]
    for row in data["rows"]:
        assert row["sides"]["ours"]["error"] < 4e-3, row
        assert row["sides"]["ours"]["median_us"] > 0
        assert row["host_us"] > 0
        assert row["host_must_us"] == 25
    assert out.with_suffix(".png").stat().st_size > 10_000
    program = "import json,sys,report; print(report.section('kernels', json.load(open(sys.argv[1]))))"
    page = subprocess.run(
        [sys.executable, "-c", program, str(out)],
        cwd=ROOT / "scripts/bench",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert page.count("\n| swiglu, ") == 2
    host = tmp_path / "host.json"
    done = subprocess.run(
        [
            sys.executable,
            "scripts/bench/run.py",
            "host_cost",
            "--only",
            "swiglu",
            "--calls",
            "5",
            "--out",
            str(host),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["us"] for row in json.loads(host.read_text())["rows"]}
    assert list(rows) == ["swiglu", "nothing"]
    assert 0 < rows["nothing"]["backward"] < rows["swiglu"]["backward"]
    unknown = subprocess.run(
        [sys.executable, *command[:6], "--only", "flash"], cwd=ROOT, capture_output=True, text=True
    )
    assert unknown.returncode == 2
    assert "--only: flash unknown; expected" in unknown.stderr
