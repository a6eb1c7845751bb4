"""`caramba tune` from the command line, and a run that reads what it wrote."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from caramba.lower.tune import BackendCandidate, measure_family
from caramba.lower.tune.attention import Inputs, Size
from caramba.runtime.tuned import Family
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, only_run

WORDS = (
    *("launch", "benchmark=none", "verify=none", "settings.instrument=none", "train.steps=2"),
    *("train.batch_size=2", "train.block_size=64", "train.phases.pretrain.steps=2"),
)


def test_a_run_reads_the_table_and_records_the_choice(tmp_path: Path, cache: Path) -> None:
    table = tmp_path / "tuned.json"
    done = caramba(("tune", "--device", "cpu", "--seconds", "1", "--out", str(table)), tmp_path, cache)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr.replace("warning: tune", "")
    (row, *_) = json.loads(table.read_text())["devices"]["cpu"]["attention"]
    assert set(row["ms"]) == {"flash", "math"}
    raw = json.loads(table.read_text())
    for item in raw["devices"]["cpu"]["attention"]:
        item["ms"] = {"flash": 2.0, "math": 1.0}  # a machine on which the choice is known
    home = tmp_path / "home"
    home.mkdir()
    for kept in cache.iterdir():
        (home / kept.name).symlink_to(kept)
    (home / "tuned.json").write_text(json.dumps(raw))
    words = (*WORDS, *SMALL, *SMALL_TEACHER)
    done = caramba(words, tmp_path, home)
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads((only_run(tmp_path) / "plan.json").read_text())
    for phase in plan.values():
        assert phase["decisions"]["attention"]["value"] == "math"
        assert phase["decisions"]["attention"]["reason"] == f"measured on cpu ({home / 'tuned.json'})"


def test_a_table_that_cannot_be_read_stops_a_run_before_it_trains(tmp_path: Path, cache: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for kept in cache.iterdir():
        (home / kept.name).symlink_to(kept)
    (home / "tuned.json").write_text("[]")
    words = (*WORDS, *SMALL, *SMALL_TEACHER)
    done = caramba(words, tmp_path, home)
    assert done.returncode == 2
    assert "tuned.json: not a table of caramba tune" in done.stderr
    assert not list(tmp_path.glob("runs/*/*/checkpoints/*"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles for the CPU")
def test_flex_attends_inside_documents_and_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [BackendCandidate("math", pads=True), BackendCandidate("flex", pads=False)]
    monkeypatch.setattr("caramba.lower.tune.attention.candidates", lambda *_: ways)
    cpu, size = torch.device("cpu"), Size(2, 4, 128, torch.float32)
    prefill = Family(72, 48, is_grouped=True, is_masked=True, trains=False)
    inputs = Inputs.random(prefill, cpu, size)
    exact, found = (inputs.call(way)() for way in ways)
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
    row, refused = measure_family(dataclasses.replace(prefill, trains=True), cpu, 0.0, size)
    assert row.ms["flex"] is None
    assert "backward on CPU" in refused["flex"]
