"""A bench goes on only with figures of this device, torch and commit."""

from __future__ import annotations

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
