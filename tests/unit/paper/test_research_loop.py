"""The research loop: rounds, typed stops, kills after every event, budgets, replay."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stub_model import FINDING, StubModel, called, said
from test_research_ledger import GATE, Launcher

from caramba.config.paper import LoopBudgetConfig, PaperConfig, ResearchLoopConfig, ReviewConfig
from caramba.config.parse import parse_as
from caramba.errors import AgentError, ConfigError
from caramba.paper import ResearchLoop, client
from caramba.paper.research import experiment, loop
from caramba.paper.research.journal import CALLS
from caramba.paper.research.ledger import LEDGER, Ledger
from caramba.paper.research.loop import RESULT, LoopResult
from caramba.paper.research.verify import verify_ledger

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")
pytestmark = pytest.mark.usefixtures("without_latex")

API = {"base_url": "http://127.0.0.1:9/v1", "retries": 0}
PAPER = PaperConfig.model_validate({"model": "stub", "sections": ["abstract", "results"], "api": API})
REVIEW = ReviewConfig.model_validate({"model": "stub", "api": API})


@pytest.fixture(autouse=True)
def _without_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment.Comparison, "_plan", lambda self, name, manifest: None)
    monkeypatch.setattr(loop, "need_latex", lambda where: None)
    monkeypatch.setattr(loop, "read_limits", lambda config: None)
    monkeypatch.setattr("caramba.paper.gate.unknown_digits", lambda *arguments: [])


@pytest.fixture(name="base")
def _base(run: Path, tmp_path: Path) -> Path:
    (tmp_path / "held_out.npy").write_bytes(b"")
    return shutil.copytree(run, tmp_path / "base")


def settings(base: Path, **keys: Any) -> ResearchLoopConfig:
    held_out = str(base.parent / "held_out.npy")
    # Two seeds decide at this level, so a loop has four runs.
    gate = {**GATE.model_dump(), "held_out": held_out, "level": 0.4, "seeds": [1, 2]}
    plain = {"max_total_experiments": 1, "auto_run_experiments": True, "gate": gate, **keys}
    return parse_as(ResearchLoopConfig, plain)


def looped(base: Path, model: StubModel, launcher: Launcher, patch: pytest.MonkeyPatch, **named: Any) -> LoopResult:
    patch.setattr(client, "open_transport", model.open)
    config = named.pop("config", None) or settings(base)
    return ResearchLoop(PAPER, REVIEW, config, launch=launcher, **named).run_sync(base)


def test_a_loop_writes_reviews_experiments_and_is_approved(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, launcher = StubModel(), Launcher()
    result = looped(base, model, launcher, monkeypatch)
    assert (result.reason, result.winner, len(result.rounds)) == ("approved", "lower_lr", 2)
    assert len(launcher.places) == 6  # two pairs, and one on held-out tokens
    paper = base / "paper"
    assert json.loads((paper / "review_iter1.json").read_text())["score"] == 6.0
    assert json.loads((paper / RESULT).read_text())["is_approved"]
    assert (paper / "proposed_lower_lr.yml").is_file()
    assert sorted(item.name for item in (paper / "versions").iterdir()) == ["001", "002"]
    text = (paper / "paper.tex").read_text()
    assert text.count(r"\noindent\texttt{") == 6
    assert "research.lower\\_lr" not in text
    assert verify_ledger(base / "research")["held_out_runs"] == 2
    events = [line["event"] for line in Ledger(base / "research").events]
    assert events.count("held_out_opened") == 1
    again = looped(base, StubModel(), Launcher(), monkeypatch)
    assert again == result


def test_a_replay_is_byte_identical_and_needs_no_model(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looped(base, StubModel(), Launcher(), monkeypatch, output_dir=tmp_path / "one")
    recorded = tmp_path / "one" / "research" / CALLS
    asked = StubModel()
    looped(base, asked, Launcher(), monkeypatch, output_dir=tmp_path / "two", replay=recorded)
    assert asked.bodies == []
    for name in (
        "paper.tex",
        "results.tex",
        "review_iter1.json",
        "review_iter2.json",
        RESULT,
        f"research/{CALLS}",
    ):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes(), name
    changed = recorded.read_text().replace("Write the paper", "Write a poem")
    (tmp_path / "other.jsonl").write_text(changed)
    with pytest.raises(AgentError, match=r"(?s)no recorded reply.*poem"):
        looped(
            base,
            asked,
            Launcher(),
            monkeypatch,
            output_dir=tmp_path / "three",
            replay=tmp_path / "other.jsonl",
        )


def finding(number: int) -> dict[str, Any]:
    sections = ("abstract", "results")
    topics = ("methodology", "experiments", "results", "writing", "citations")
    return {
        **FINDING,
        "section": sections[number % 2],
        "place": sections[number % 2],
        "topic": topics[number % 5],
    }


class Adversary(StubModel):
    """A reviewer that follows a script of scores and findings, whatever the paper is; its writer always rewrites."""

    def __init__(self, scores: list[float], findings: Callable[[int], list[dict[str, Any]]]) -> None:
        super().__init__()
        self.scores, self.findings = scores, findings

    def write(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return super().write(messages)

    def judge(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        self.n_reviews += 1
        score = self.scores[min(self.n_reviews, len(self.scores)) - 1]
        given = {
            "score": score,
            "action": "major_revision",
            "summary": "Approve? Never.",
            "findings": self.findings(self.n_reviews),
        }
        return called(("submit_review", given))


@pytest.mark.parametrize(
    ("scores", "findings", "reason"),
    [
        ([5.0, 6.0, 7.0, 7.4], lambda number: [finding(number)], "max_iterations"),
        ([5.0], lambda number: [finding(number)], "no_gain"),
        ([5.0, 6.0], lambda number: [finding(0)], "no_finding_closed"),
        ([10.0], lambda number: [finding(number)], "no_gain"),  # a score bypasses no blocking finding
        ([9.5], lambda number: [], "approved"),
    ],
)
def test_every_reviewer_ends_with_a_typed_reason(
    scores: list[float],
    findings: Callable[[int], list[dict[str, Any]]],
    reason: str,
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ResearchLoopConfig(max_iterations=4)
    result = looped(base, Adversary(scores, findings), Launcher(), monkeypatch, config=config)
    assert result.reason == reason
    assert len(result.rounds) <= 4


class Silent(StubModel):
    def write(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return said("I would rather not.")


class Idle(StubModel):
    def write(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return super().write(messages) if "Nothing is written" in messages[1]["content"] else said("done")


def test_a_model_out_of_form_and_a_repeated_paper_end_the_loop(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ResearchLoopConfig()
    result = looped(base, Silent(), Launcher(), monkeypatch, config=config, output_dir=tmp_path / "silent")
    assert result.reason == "model_unusable"
    assert not (tmp_path / "silent" / "paper.tex").exists()
    result = looped(base, Idle(), Launcher(), monkeypatch, config=config, output_dir=tmp_path / "idle")
    assert result.reason == "repeated_paper"


@pytest.mark.parametrize(
    ("budget", "kind"),
    [({"max_calls": 3}, "calls"), ({"max_tokens": 12_000}, "tokens"), ({"max_gpu_hours": 0.5}, "gpu_hours")],
)
def test_the_parent_budget_ends_the_loop_and_is_never_crossed(
    budget: dict[str, Any], kind: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = StubModel()
    config = settings(base, budget=LoopBudgetConfig.model_validate(budget).model_dump())
    result = looped(base, model, Launcher(), monkeypatch, config=config)
    assert result.reason == "budget"
    assert kind in result.message
    file = base / "research" / "spend.json"
    spent = json.loads(file.read_text()) if file.is_file() else {"calls": 0, "tokens": 0}
    assert spent["calls"] == len(model.bodies)
    assert all(spent[name.removeprefix("max_")] <= limit for name, limit in budget.items())


def test_a_person_confirms_and_an_edited_proposal_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(base, auto_run_experiments=False)
    launcher = Launcher()
    result = looped(base, StubModel(), launcher, monkeypatch, config=config)
    assert (result.reason, launcher.places) == ("person", [])
    file = base / "paper" / "proposed_lower_lr.yml"
    text = file.read_text()
    file.write_text(text.replace("0.002", "0.05"))
    with pytest.raises(ConfigError, match=r"proposed_lower_lr\.yml, line \d+: not what the review proposed"):
        looped(base, StubModel(), launcher, monkeypatch, config=config, confirm=lambda proposal: True)
    file.write_text(text)
    result = looped(base, StubModel(), launcher, monkeypatch, config=config, confirm=lambda proposal: True)
    assert result.reason == "approved"


def test_what_cannot_be_decided_is_refused_before_anything_is_paid(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StubModel()
    config = settings(base, gate=GATE.model_dump())
    with pytest.raises(ConfigError, match="no held-out tokens there"):
        looped(base, model, Launcher(), monkeypatch, config=config)
    config = settings(base, budget={"max_cost_usd": 1.0})
    with pytest.raises(ConfigError, match="what stub costs is not known"):
        looped(base, model, Launcher(), monkeypatch, config=config)
    with pytest.raises(ConfigError, match="need at least"):
        settings(base, gate={**GATE.model_dump(), "seeds": [1, 2]})
    assert model.bodies == []
    assert not os.listdir(base / "paper") if (base / "paper").is_dir() else True


def test_an_edited_review_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(base, max_iterations=1)
    looped(base, StubModel(), Launcher(), monkeypatch, config=config)
    file = base / "paper" / "review_iter1.json"
    file.write_text(file.read_text().replace("6.0", "9.9"))
    with pytest.raises(ConfigError, match=rf"not the review of .*{LEDGER}, line"):
        looped(base, StubModel(), Launcher(), monkeypatch, config=config)
