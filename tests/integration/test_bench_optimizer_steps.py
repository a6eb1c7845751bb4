"""The bench of optimiser steps holds one kind of weights at a time, which its peaks of memory are of."""

from __future__ import annotations

import gc
import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


def test_weights_of_the_kind_before_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts/bench"))
    bench, report = (importlib.import_module(name) for name in ("cases.optimizer_steps", "report"))
    made: list[weakref.ref[Any]] = []
    alive: list[int] = []
    make = bench.parameters_of

    def watched(*given: Any) -> list[tuple[str, Any]]:
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
        named = make(*given)
        made.extend(weakref.ref(x) for _, weight in named for x in (weight, weight.grad))
        return named

    monkeypatch.setattr(bench, "parameters_of", watched)
    rows = bench.adamw_rows("tiny", torch.device("cpu"), 1)
    assert alive == [0] * 5
    assert sum(row["name"].endswith("ours") for row in rows) == 7
    # Files of before have neither shares nor peaks.
    old = {key: value for key, value in rows[1].items() if key not in ("share_of_copy", "peak_bytes")}
    data = {"adamw": {"rows": [rows[1] | {"peak_bytes": 2e9}, old]}}
    first, second = report.section("optimizer_steps", data).splitlines()[-2:]
    assert first.count("|") == second.count("|") == 8
    assert first.endswith("| 2.0 |")
    assert f"| {rows[1]['share_of_copy']:.0%} |" in first
