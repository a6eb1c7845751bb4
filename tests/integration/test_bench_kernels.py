"""The bench of kernels runs through on any machine and its section renders."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


def test_a_tiny_bench_writes_rows_errors_and_a_plot(
    tmp_path: Path, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.json"
    words = ["kernels", "--size", "tiny", "--seconds", "1", "--no-compile", "--out", str(out)]
    assert bench.main([*words, "--only", "rope,swiglu,lion_step,norm_dropout_activation"]) == 0
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
    page = importlib.import_module("report").section("kernels", data)
    assert page.count("\n| swiglu, ") == 2
    host = tmp_path / "host.json"
    # In a process of its own: without a GPU it puts a driver in Triton's place that launches nothing.
    command = [
        sys.executable,
        bench.__file__,
        "host_cost",
        "--only",
        "swiglu",
        "--calls",
        "5",
        "--out",
        str(host),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["us"] for row in json.loads(host.read_text())["rows"]}
    assert list(rows) == ["swiglu", "nothing"]
    assert 0 < rows["nothing"]["backward"] < rows["swiglu"]["backward"]
    with pytest.raises(SystemExit) as ended:
        bench.main([*words, "--only", "flash"])
    assert ended.value.code == 2
    assert "--only: flash unknown; expected" in capsys.readouterr().err
