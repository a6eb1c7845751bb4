"""The bench of whole decodes runs through on any machine, holds its peer to our logits, and its section renders."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("torchao")


def test_a_tiny_bench_writes_rows_and_a_plot_and_adds_parts(tmp_path: Path, bench: ModuleType) -> None:
    here = importlib.import_module("record").machine_facts(torch.device("cpu"))
    out = tmp_path / "inference.json"
    before = {
        "part": "batch",
        "side": "teacher",
        "batch": 1,
        "context": 4,
        "tok_s": 5.0,
        "p20": 4.0,
        "p80": 6.0,
    }
    out.write_text(json.dumps({"size": "tiny", "machine": here, "rows": [before | {"ran": "eager"}]}))
    words = [*("--size", "tiny", "--device", "cpu", "--repeats", "1"), "--parts", "short,weights,context"]
    assert bench.main(["inference", *words, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["rows"][0]["part"] == "batch"  # of an earlier call
    sides = [(row["part"], row["side"], row["context"]) for row in data["rows"][1:]]
    assert sides[:2] == [("short", side, 16) for side in ("static loop", "captured")]
    names = ("16 bits", "int8 weights", "int8 weights and head", "int4 weights", "int4 weights and head")
    assert [row for row in sides if row[0] == "weights"] == [("weights", side, 16) for side in names]
    assert sides[-2:] == [("context", "teacher", 64), ("context", "student", 64)]
    errors = [row["peer_error"] for row in data["rows"] if "peer_error" in row]
    assert 0 < max(errors) < 1e-5
    assert all(row.get("skipped") or row["tok_s"] > 0 for row in data["rows"])
    assert out.with_suffix(".png").stat().st_size > 10_000
    page = importlib.import_module("report").section("inference", data)
    assert "x the static loop" in page
    assert "x 16 bits |" in page
    assert "int4 weights and head" in page
