"""The order of attention backends that a table gives."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.config.layer import AttentionLayerConfig
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.runtime import choose_attention, families_of, plan
from caramba.runtime.tuned import (
    PADDED,
    SHIPPED,
    BackendTimings,
    Family,
    attention_rows,
    rank,
    read_tables,
    tuning_path,
    write_table,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path))
    return tmp_path


def test_the_shipped_table_has_cudnn_first_on_the_h200() -> None:
    rows = attention_rows(read_tables(SHIPPED)["NVIDIA H200"])
    chosen = rank(rows, "x")
    assert chosen.order == ("cudnn", "flash", "efficient", "math")
    assert chosen.keeps_two_widths


def test_the_fastest_leads_and_a_refusal_counts_against() -> None:
    one = BackendTimings(Family(64, 64), {"cudnn": 2.0, "flash": 1.0, "efficient": 3.0})
    assert rank([one], "x").order == ("flash", "cudnn", "efficient", "math")
    assert not rank([one], "x").keeps_two_widths
    two = BackendTimings(Family(128, 64), {"cudnn": 1.0, "flash": None, "efficient": 3.0, "flash" + PADDED: 2.5})
    both = rank([one, two], "x")
    # sqrt(2 * 1), sqrt(3 * 3), sqrt(1 * 10); all padded flash would take sqrt(1 * 2.5)
    assert both.order == ("cudnn", "efficient", "flash", "math")
    assert both.keeps_two_widths
    padded = BackendTimings(Family(128, 64), {"cudnn": 9.0, "flash": None, "efficient": 8.0, "flash" + PADDED: 1.5})
    assert rank([one, padded], "x").order[:2] == ("flash", "cudnn")  # type: ignore[index]
    assert not rank([one, padded], "x").keeps_two_widths


def test_documents_take_a_mask_only_where_it_was_faster() -> None:
    family = Family(64, 64, is_masked=True)
    assert rank([BackendTimings(family, {"efficient": 2.0})], "x").uses_varlen  # not measured
    fast = BackendTimings(family, {"varlen": 1.0, "flex": 0.5, "cudnn": None, "efficient": 2.0})
    slow = BackendTimings(family, {"varlen": 5.0, "efficient": 2.0})
    assert rank([fast], "x").uses_varlen
    assert rank([fast], "x").order == ("efficient", "cudnn", "flash", "math")
    assert not rank([slow], "x").uses_varlen
    assert not rank([fast, slow], "x").uses_varlen
    assert not rank([BackendTimings(family, {"varlen": None, "efficient": 2.0})], "x").uses_varlen
    (packed,) = families_of([AttentionLayerConfig(d_model=16, n_heads=2)], is_masked=True)
    assert packed == Family(8, 8, is_masked=True)


def test_nothing_is_tried_after_math() -> None:
    assert rank([BackendTimings(Family(8, 8), {"flash": 2.0, "math": 1.0})], "x").order == ("math",)


def test_a_model_is_judged_by_the_nearest_shapes(folder: Path) -> None:
    narrow = BackendTimings(Family(64, 64, True), {"flash": 2.0, "math": 1.0})
    wide = BackendTimings(Family(128, 128), {"flash": 1.0, "math": 2.0})
    machine = {"torch": torch.__version__}
    write_table(tuning_path(), "cpu", machine, [narrow, wide])
    cpu = torch.device("cpu")
    assert choose_attention(cpu, [Family(48, 64, True)]).order == ("math",)
    assert choose_attention(cpu, [Family(96, 128)]).order[0] != "math"  # type: ignore[index]
    choice = choose_attention(cpu, [Family(48, 64, True), Family(96, 128)])
    phase = PhaseConfig.model_validate({"phase": "blockwise", "steps": 5})
    decided = plan(phase, device="cpu", kernels="auto", ops={}, name="x", attention=choice)
    assert decided.decisions["attention"].measured == {
        "64x64 grouped.flash_ms": 2.0,
        "64x64 grouped.math_ms": 1.0,
        "128x128.flash_ms": 1.0,
        "128x128.math_ms": 2.0,
    }
    again = BackendTimings(Family(64, 64, True), {"flash": 1.0, "math": 1.5})
    write_table(tuning_path(), "cpu", machine, [again])
    assert attention_rows(read_tables(tuning_path())["cpu"]) == [again, wide]
    write_table(tuning_path(), "cpu", {"torch": "another"}, [again])
    assert attention_rows(read_tables(tuning_path())["cpu"]) == [again]
    decided = plan(phase, device="cpu", kernels="auto", ops={}, name="x").decisions["attention"]
    assert decided.value.endswith("math")
    assert decided.measured is None  # of no model
    assert decided.reason == f"measured on cpu ({tuning_path()})"


def test_families_are_those_that_training_runs() -> None:
    grouped = AttentionLayerConfig.model_validate({"mode": "gqa", "d_model": 64, "n_heads": 4, "n_kv_heads": 2})
    assert families_of([grouped, grouped]) == [Family(16, 16, is_grouped=True)]


FAMILY: dict[str, Any] = {"d_qk": 8, "d_v": 8, "ms": {"math": 1.0}}


def changed(**values: Any) -> str:
    return json.dumps({"format": 1, "devices": {"cpu": {"attention": [FAMILY | values]}}})


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("{", "JSONDecodeError"),
        ('{"format": 1, "devices": {"cpu": {}}}', "KeyError: 'attention'"),
        (
            json.dumps({"format": 1, "devices": {"cpu": {"attention": [{"d_qk": 8, "d_v": 8, "ms": {"fast": 1}}]}}}),
            r"attention has \['fast'\], expected a time of one of cudnn, flash",
        ),
        (changed(d_qk=0), "attention has a family .*'d_qk': 0.*, expected widths of 1 or more"),
        (changed(d_qk="64"), "attention has a family .*'d_qk': '64'"),
        (changed(trains="no"), "attention has a family .*'trains': 'no'.*true or false"),
        (changed(ms={"math": 0}), "attention has times .*, expected milliseconds above 0"),
        (changed(ms={"math": 1.0, "flash": -1.0}), "attention has times"),
        (changed(ms={"math": 1.0, "flash": math.nan}), "attention has times"),
        (changed(ms={"math": math.inf}), "attention has times"),
        (
            json.dumps({"format": 1, "devices": {"cpu": {"machine": [], "attention": [FAMILY]}}}),
            "machine of cpu is not a mapping",
        ),
    ],
)
def test_a_broken_table_is_refused_with_its_path(content: str, text: str) -> None:
    tuning_path().write_text(content)
    with pytest.raises(ConfigError, match=rf"tuned.json: not a table of caramba tune .*{text}.*delete it"):
        choose_attention(torch.device("cpu"))


def test_a_table_that_says_nothing_of_attention_leaves_it_to_the_next_one(folder: Path) -> None:
    tuning_path().write_text(json.dumps({"format": 1, "devices": {"cpu": {"attention": []}}}))
    found = choose_attention(torch.device("cpu"), [Family(8, 8)])
    assert (found.order, found.source) == (
        None,
        "cpu is in no table: torch picks by shape (caramba tune measures)",
    )
