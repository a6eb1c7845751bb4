"""A bench goes on only with figures of this device, torch and commit, and says why a launch of its made no run."""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def test_the_rows_of_another_machine_or_commit_are_measured_anew(tmp_path: Path) -> None:
    batching = importlib.import_module("cases.batching")
    inference = pytest.importorskip("cases.inference")
    here = importlib.import_module("record").machine_facts(torch.device("cpu"))
    rows = [{"part": "long", "tok_s": 1.0}]
    settings = {"slots": 4, "prompt": (1, 2)}
    file, kept = tmp_path / "before.json", {"arrivals": [{"way": "static"}], "batch": []}
    facts: dict[str, Any] = {"size": "tiny", "rows": rows, "settings": settings, **kept}
    nothing = {"arrivals": [], "batch": []}

    def resumed(**machine: str | None) -> tuple[Any, Any]:
        file.write_text(json.dumps(facts | {"machine": here | machine}))
        return inference.kept_rows(file, [], "tiny", here), batching.kept(file, settings, here)

    assert resumed(driver="another") == (rows, kept)
    for other in ({"device": "another"}, {"commit": "0123456"}, {"torch": "1.0"}, {"commit": None}):
        assert resumed(**other) == ([], nothing), other
    file.write_text(json.dumps(facts))  # of an unknown machine
    assert (inference.kept_rows(file, [], "tiny", here), batching.kept(file, settings, here)) == ([], nothing)


def test_the_ladder_goes_on_only_with_its_own_run(tmp_path: Path) -> None:
    ladder = importlib.import_module("cases.ladder")
    machine = {"name": "a", "torch": "2.13", "threads": 2}
    own = ladder.folder_of(tmp_path, ["x=1"], machine, "c0ffee")
    assert own == ladder.folder_of(tmp_path, ["x=1"], machine | {"threads": 1}, "c0ffee")
    others = {
        ladder.folder_of(tmp_path, ["x=2"], machine, "c0ffee"),
        ladder.folder_of(tmp_path, ["x=1"], machine | {"name": "b"}, "c0ffee"),
        ladder.folder_of(tmp_path, ["x=1"], machine | {"torch": "2.11"}, "c0ffee"),
        ladder.folder_of(tmp_path, ["x=1"], machine, "decade"),
    }
    assert len(others) == 4
    assert own not in others


def test_a_launch_that_makes_no_run_says_why(tmp_path: Path) -> None:
    planned, record = (importlib.import_module(name) for name in ("cases.planned", "record"))
    words = argparse.Namespace(
        work=tmp_path, out=tmp_path / "o.json", seconds=60.0, overrides=["modle=tiny"], again=False
    )
    with pytest.raises(RuntimeError, match=r"(?s)made no run: exit status 2; its output:.*modle"):
        planned.Bench(words, record.Record("planned", tmp_path / "o.json", ["planned"])).run("plan")
