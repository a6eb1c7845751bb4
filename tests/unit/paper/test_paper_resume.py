"""A draft that stops, for whatever reason, goes on; what it made is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished_run import write_run
from scripted_paper import ABSTRACT, RESULTS, drafted, section, whole
from tests.needs import need
from tests.paper_servers import Answer, LiteratureServer, calls, chat_server, fails, says

from caramba.config.paper import PaperConfig
from caramba.errors import AgentError, BudgetExceeded, ConfigError
from caramba.paper import PaperDrafter
from caramba.paper.folder import Draft

need("litellm")
pytestmark = pytest.mark.usefixtures("without_latex")

Make = Callable[..., PaperConfig]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"max_iterations": 2}, "2 of max_iterations=2 are spent"),
        ({"max_tokens": 12000, "max_reply_tokens": 100}, "max_tokens=12,000 are spent"),
        (
            {
                "max_cost_usd": 0.011,
                "usd_per_million_prompt": 1.0,
                "usd_per_million_reply": 1.0,
                "max_reply_tokens": 100,
            },
            "max_cost_usd=0.011 are spent",
        ),
    ],
)
def test_a_spent_budget_keeps_the_draft(budget: dict[str, Any], message: str, config: Make, own: Path) -> None:
    look = calls(("get_experiment_results", {}))
    with chat_server(calls(("update_section", section("abstract", ABSTRACT))), *[look] * 40) as server:
        with pytest.raises(BudgetExceeded, match=message):
            drafted(config(server.url, budget=budget), own)
        n_before = len(server.requests)
        with pytest.raises(BudgetExceeded, match=message):  # going on does not begin a budget anew
            drafted(config(server.url, budget=budget), own, update=True)
        assert len(server.requests) == n_before
    assert not (own / "paper/paper.tex").exists()
    with chat_server(calls(("update_section", section("results", RESULTS))), says("done")) as server:
        found = drafted(config(server.url), own, update=True)
        assert server.requests[0]["messages"][2]["tool_calls"][0]["function"]["name"] == "update_section"
    assert found.spent.iterations == n_before + 2
    assert ABSTRACT in (own / "paper/paper.tex").read_text()


@pytest.mark.parametrize(
    "failure", [fails(401), fails(400), fails(500), Answer(b"<html>")], ids=lambda item: str(item.status)
)
def test_a_model_that_fails_changes_no_version(failure: Answer, config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    before = {file: file.read_bytes() for file in (own / "paper").rglob("*") if file.suffix in (".tex", ".pdf", ".bib")}
    with (
        chat_server(calls(("get_paper_template", {})), *[failure] * 9) as server,
        pytest.raises((AgentError, ConfigError)),
    ):
        drafted(config(server.url, api={"max_wait_s": 0.01}), own, update=True)
    after = {file: file.read_bytes() for file in (own / "paper").rglob("*") if file.suffix in (".tex", ".pdf", ".bib")}
    assert after == before
    with chat_server(says("Nothing to change.")) as server:
        assert drafted(config(server.url), own, update=True).version == 1
        assert len(server.requests[0]["messages"]) == 4  # the conversation went on where it broke off


def test_an_update_goes_on_from_the_last_version(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
        with pytest.raises(ConfigError, match=r"holds version 1 of a paper; --update resumes it, --output-dir"):
            drafted(config(server.url), own)

    def improve(request: dict[str, Any]) -> Answer:
        sections = json.loads(request["messages"][-1]["content"])["sections"]
        assert list(sections) == ["abstract", "results"]
        return calls(("update_section", section("abstract", "We do better.")))

    with chat_server(calls(("read_tex_file", {})), improve, says("done")) as server:
        found = drafted(config(server.url), own, update=True)
    assert (found.version, found.spent.iterations) == (2, 3)  # a new draft has a budget of its own
    text = (own / "paper/paper.tex").read_text()
    assert "We do better." in text
    assert RESULTS in text
    assert ABSTRACT in (own / "paper/versions/001/paper.tex").read_text()


class Killed(BaseException):
    """Stands for a kill: no handler of errors takes it."""


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_kill_between_any_two_steps_is_made_good(
    moment: int, config: Make, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is saved after each of its eight steps; it stops behind one and goes on as a new process would."""
    left, save = moment, Draft.save

    def counted(self: Draft, file: Path) -> None:
        nonlocal left
        save(self, file)
        left -= 1
        if left == 0:
            raise Killed

    first = calls(("get_paper_template", {}), ("update_section", section("abstract", ABSTRACT)))
    with chat_server(first, says("done")) as server:
        plain = config(server.url, sections=["abstract"])
        with monkeypatch.context() as patch:
            patch.setattr(Draft, "save", counted)
            with pytest.raises(Killed):
                drafted(plain, own)
        if moment < 8:  # the last step is behind the adopted version
            assert drafted(plain, own, update=True).version == 1
        assert len(server.requests) == 2  # a reply that was saved is never paid for again
    assert json.loads((own / "paper/draft.json").read_text())["messages"] == []
    assert ABSTRACT in (own / "paper/paper.tex").read_text()


def test_a_version_holds_all_that_an_update_needs(config: Make, own: Path, literature: LiteratureServer) -> None:
    with chat_server(
        calls(("search_arxiv", {"query": "x"})),
        calls(("add_citation", {"source_id": "arxiv:1706.03762"})),
        whole(RESULTS + r" As in \citep{arxiv:1706.03762}."),
        says("done"),
    ) as server:
        drafted(config(server.url), own)
    (own / "paper/draft.json").unlink()
    with chat_server(says("fine")) as server:
        assert drafted(config(server.url), own, update=True).version == 1
    assert "arxiv:1706.03762" in (own / "paper/references.bib").read_text()


def test_old_versions_go_as_configured(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    for number in (2, 3):
        with chat_server(whole(RESULTS + " More." * number), says("done")) as server:
            assert drafted(config(server.url, max_versions=2), own, update=True).version == number
    assert sorted(item.name for item in (own / "paper/versions").iterdir()) == ["002", "003"]


def test_runs_that_cannot_be_drafted_from(config: Make, own: Path, tmp_path: Path) -> None:
    with chat_server() as server:
        (own / "artifacts/report.json").rename(tmp_path / "report.json")
        with pytest.raises(
            ConfigError,
            match=r"artifacts/report\.json: cannot be read .*; write it, at the end of the run, with `caramba resume",
        ):
            drafted(config(server.url), own)
        (own / "artifacts/report.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"report\.json: not a report of this version"):
            drafted(config(server.url), own)
        assert server.requests == []


def test_two_drafts_of_one_paper_are_kept_apart(config: Make, own: Path) -> None:
    def second(request: dict[str, Any]) -> Answer:
        with pytest.raises(ConfigError, match="is running this draft"):
            drafted(config(server.url), own, update=True)
        return whole()

    with chat_server(second, says("done")) as server:
        assert drafted(config(server.url), own).version == 1


def test_the_async_form_and_another_folder(config: Make, own: Path, tmp_path: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafter = PaperDrafter(config(server.url), tmp_path / "elsewhere")
        found = asyncio.run(drafter.draft(own))
    assert found.paper == tmp_path / "elsewhere/paper.tex"
    assert found.paper.is_file()
    assert not (own / "paper").exists()


def test_another_runs_paper_is_not_updated(config: Make, own: Path, tmp_path: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own, tmp_path / "shared")
    other = tmp_path / "other"
    write_run(other)
    for file in ("draft.json", None):  # by what the draft says, then by what its version says
        with chat_server(says("done")) as server:
            with pytest.raises(
                ConfigError, match=r"holds a paper on run paper_run0, and this is run other; name another"
            ):
                drafted(config(server.url), other, tmp_path / "shared", update=True)
            assert server.requests == []
        if file:
            (tmp_path / "shared" / file).unlink()


def test_changed_options_begin_another_conversation_in_the_same_budget(config: Make, own: Path) -> None:
    with chat_server(calls(("list_artifacts", {}))) as server, pytest.raises(AgentError):
        drafted(config(server.url, title="Old"), own)
    with chat_server(whole(), says("done")) as server:
        found = drafted(config(server.url, title="New", custom_instructions="Be brief."), own, update=True)
        first = server.requests[0]["messages"]
    assert len(first) == 2
    assert '"title": "New"' in first[1]["content"]
    assert "Be brief." in first[1]["content"]
    assert found.spent.iterations == 4


def test_an_unfinished_draft_is_gone_on_with_only_by_update(config: Make, own: Path) -> None:
    with chat_server(fails(401)) as server, pytest.raises(ConfigError):
        drafted(config(server.url), own)
    with (
        chat_server(calls(("list_artifacts", {}))) as server,
        pytest.raises(AgentError, match=r"resume with `caramba paper .*/run --update`"),
    ):
        drafted(config(server.url), own, update=True)
    with (
        chat_server() as server,
        pytest.raises(ConfigError, match="holds an unfinished draft of a paper; --update"),
    ):
        drafted(config(server.url), own)


def test_the_command_that_goes_on_names_the_folder(config: Make, own: Path, tmp_path: Path) -> None:
    with (
        chat_server(says("no")) as server,
        pytest.raises(BudgetExceeded, match=r"`caramba paper \S+/run --output-dir '\S+/a folder' --update`"),
    ):
        drafted(config(server.url, budget={"max_iterations": 1}), own, tmp_path / "a folder")


def test_a_model_that_cannot_be_asked_leaves_no_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for keys, message in (
        ({"model": "gpt-4o"}, "the environment lacks OPENAI_API_KEY"),
        (
            {"api": {"base_url": "http://127.0.0.1:9/v1"}, "budget": {"max_cost_usd": 1.0}},
            "what gpt-4o costs is not known",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            drafted(PaperConfig.model_validate(keys), own)
        assert not (own / "paper").exists()
