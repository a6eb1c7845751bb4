"""The script of docs/benchmarks/research_attacks.json on a few sessions: nothing hostile gets into a head."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from caramba.paper import client, drafter, gate, printed
from caramba.paper.check import Checked, check_section

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    file = Path(__file__).parents[3] / "scripts" / "research_attacks.py"
    spec = importlib.util.spec_from_file_location("research_attacks", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str(file.parent))
    spec.loader.exec_module(module)
    for owner, name in (
        (client, "open_transport"),
        (drafter, "need_latex"),
        (gate, "compile_paper"),
        (gate, "unknown_digits"),
        (printed, "compile_paper"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what the script replaces is put back
    return module


def test_fuzzed_sessions_leave_nothing_ungrounded(
    script: ModuleType, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = script.run_sessions(own, tmp_path, 5, 0)
    assert counts["adopted"] > 0
    assert {kind: counts[kind] for kind in script.KINDS} == dict.fromkeys(script.KINDS, 0)

    def let_through(*arguments: Any, **named: Any) -> Checked:
        return replace(check_section(*arguments, **named), problems=())

    monkeypatch.setattr(gate, "check_section", let_through)  # the count sees what the gate lets through
    counts = script.run_sessions(own, tmp_path, 5, 0)
    assert counts["ungrounded_numbers"] > 0
    assert counts["unverifiable_citations"] > 0


def test_planted_defects_and_false_alarms(script: ModuleType, run: Path) -> None:
    counts = script.of_defects(run)
    assert (counts["planted_defects"], counts["false_alarms"]) == (60, 0)
    assert counts["planted_defects_found"] >= 54
