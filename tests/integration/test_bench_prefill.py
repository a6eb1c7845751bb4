"""The bench of prompts runs through on any machine, and its section renders."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import torch


def test_a_tiny_bench_writes_rows_and_a_section(tmp_path: Path, bench: ModuleType) -> None:
    out = tmp_path / "prefill.json"
    words = [*("--size", "tiny", "--device", "cpu", "--repeats", "1"), *("--tokens", "96", "--chunk", "32")]
    assert bench.main(["prefill", *words, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert [row["side"] for row in data["models"]] == [
        *("gqa", "llama32_dba", "llama32_dba, joined keys"),
        *("llama32_dba_384b", "llama32_dba_384b, joined keys"),
    ]
    assert all(row["tok_s"] > 0 and len(row["all_s"]) == 1 for row in data["models"])
    shapes = list(dict.fromkeys(row["shape"] for row in data["ops"]))
    assert shapes == [
        *("2 x 32, forward", "2 x 32, both ways", "1 x 32 behind 64, forward", "1 x 2 behind 94, absorbed")
    ]
    timed = [row for row in data["ops"] if "refused" not in row]
    assert {row["side"] for row in timed} == {"decoupled_attention", "flash, padded"}
    assert all(row["error"] < 1e-5 for row in timed)
    assert data["left_out"] == []
    page = importlib.import_module("report").section("prefill", data)
    assert "| llama32_dba, joined keys |" in page
    assert "| 2 x 32, forward | 4, 16 + 48 and 16 | flash | refuses | | |" in page


def test_arithmetic_is_of_the_pairs_that_causality_leaves(bench: ModuleType) -> None:
    module: ModuleType = importlib.import_module("cases.prefill")
    shape = module.Shape("x", 2, 3, 5, 4, (16, 48, 8))
    pairs = 2 * 4 * (3 + 4 + 5)
    assert shape.flops == 2 * pairs * (64 + 8)
    assert module.Shape("x", 2, 3, 5, 4, (16, 48, 8), True).flops == 2 * pairs * (4 * 64 + 3 * 8)
    device = torch.device("cpu")
    errors = {
        name: module.error_of(shape, name, device, torch.float32)
        for name, _, _ in module.sides(shape, shape.inputs(device, torch.float32))
    }
    assert list(errors) == ["decoupled_attention"]
    assert 0 < errors["decoupled_attention"] < 1e-5
