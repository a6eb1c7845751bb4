"""What a person does to a paper is kept as written, or refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_paper import ABSTRACT, RESULTS, drafted, section, whole
from tests.needs import need
from tests.paper_servers import Answer, calls, chat_server, says

from caramba.config.paper import PaperConfig
from caramba.errors import AgentError, BudgetExceeded, ConfigError
from caramba.paper import gate
from caramba.paper.compile import Compiled
from caramba.paper.folder import Draft

need("litellm")
pytestmark = pytest.mark.usefixtures("without_latex")

Make = Callable[..., PaperConfig]


def test_what_a_person_edited_is_kept(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    paper = own / "paper/paper.tex"
    paper.write_text(paper.read_text().replace(ABSTRACT, "My own words, with 42 numbers and \\emph{care}."))
    with chat_server(
        whole(),  # would overwrite what the person wrote
        calls(("read_tex_file", {})),
        calls(("update_section", section("results", RESULTS + " It is small."))),
        says("done"),
    ) as server:
        assert drafted(config(server.url), own, update=True).version == 2
        refused, read, accepted = server.results()
    assert "abstract: edited by a person since" in refused["error"]
    assert [item["by"] for item in read["sections"].values()] == ["human", "agent"]
    assert "accepted" in accepted
    text = paper.read_text()
    assert "My own words, with 42 numbers and" in text
    assert "It is small." in text
    record = json.loads((own / "paper/versions/002/version.json").read_text())
    assert {name: item["by"] for name, item in record["sections"].items()} == {
        "abstract": "human",
        "results": "agent",
    }


def test_edits_that_cannot_be_kept_stop_before_anything_is_sent(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    paper = own / "paper/paper.tex"
    original = paper.read_text()
    for changed, message in (
        (
            original.replace(r"\maketitle", r"\maketitle \thispagestyle{empty}"),
            "text outside of the sections, their order or a heading was changed",
        ),
        (original.replace("% caramba:end abstract\n", ""), "the marks of section abstract are not whole"),
        ("nothing of it", "the marks of section any are not whole"),
    ):
        paper.write_text(changed)
        with chat_server() as server:
            with pytest.raises(ConfigError, match=message):
                drafted(config(server.url), own, update=True)
            assert server.requests == []
        assert paper.read_text() == changed
    paper.write_text(original)
    with chat_server() as server, pytest.raises(ConfigError, match=r"paper\.sections leaves out results"):
        drafted(config(server.url, sections=["abstract"]), own, update=True)


def test_other_artifacts_are_checked_anew(config: Make, own: Path) -> None:
    with chat_server(
        whole(r"It has \result{latency.student.ttft_ms@prompt=64,gen=32,batch=1}."), says("done")
    ) as server:
        drafted(config(server.url), own)
    report = json.loads((own / "artifacts/report.json").read_text())
    del report["metrics"]["latency.student.ttft_ms@prompt=64,gen=32,batch=1"]
    (own / "artifacts/report.json").write_text(json.dumps(report))
    with chat_server(
        says("fine as it is"), calls(("update_section", section("results", RESULTS))), says("done")
    ) as server:
        assert drafted(config(server.url), own, update=True).version == 2
        told_first = server.requests[0]["messages"][1]["content"]
        told_then = server.requests[1]["messages"][-1]["content"]
    assert "It no longer holds" in told_first
    assert "is no key of report.json" in told_then


@pytest.fixture(name="version")
def _version(config: Make, own: Path) -> Path:
    """The paper.tex of a first version."""
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    return own / "paper/paper.tex"


def change(paper: Path, old: str, new: str) -> None:
    text = paper.read_text()
    assert old in text
    paper.write_text(text.replace(old, new))


def test_an_edit_that_is_saved_while_the_draft_runs_is_kept(config: Make, own: Path, version: Path) -> None:
    def edit(request: dict[str, Any]) -> Answer:
        change(version, ABSTRACT, "Edited while the draft ran.")
        return whole(RESULTS + " It is small.")

    with chat_server(edit, says("done"), says("done now")) as server:
        assert drafted(config(server.url), own, update=True).version == 2
        told = server.requests[-1]["messages"][-1]
    assert told["role"] == "user"
    assert "A person edited the paper meanwhile (abstract)" in told["content"]
    assert "Edited while the draft ran." in version.read_text()
    assert "It is small." in version.read_text()


def test_a_paper_that_is_saved_while_its_first_draft_runs_is_kept(config: Make, own: Path) -> None:
    def save(request: dict[str, Any]) -> Answer:
        (own / "paper/paper.tex").write_text("mine")
        return whole()

    with chat_server(save, says("done")) as server:
        assert drafted(config(server.url), own).version == 1
    assert (own / "paper/paper.tex.edited-1").read_text() == "mine"


REMOVED = "% caramba:section abstract\n\\begin{abstract}\n" + ABSTRACT + "\n\\end{abstract}\n% caramba:end abstract\n"
NOT_KEPT = {
    "heading": ((r"\section{Results}", r"\section{What we found}"),),
    "no heading": ((r"\section{Results}\label{sec:results}" + "\n", ""),),
    "end of abstract": (("\\end{abstract}\n", ""),),
    "author and a section": ((REMOVED, ""), (r"\author{}", r"\author{My Name}")),
    "heading and a section": ((REMOVED, ""), (r"\section{Results}", r"\section{What we found}")),
    "order": ((REMOVED, ""), (r"\end{document}", REMOVED + r"\end{document}")),
    "between": (("% caramba:end abstract\n", "% caramba:end abstract\nWords.\n"),),
}


@pytest.mark.parametrize("changes", NOT_KEPT.values(), ids=NOT_KEPT)
def test_what_code_writes_is_not_overwritten_unsaid(
    changes: tuple[tuple[str, str], ...], config: Make, own: Path, version: Path
) -> None:
    for old, new in changes:
        change(version, old, new)
    edited = version.read_text()
    with chat_server() as server:
        with pytest.raises(ConfigError, match="text outside of the sections, their order or a heading"):
            drafted(config(server.url), own, update=True)
        assert server.requests == []
    assert version.read_text() == edited


def test_a_section_that_a_person_removed_is_written_anew_and_blank_lines_are_nothing(
    config: Make, own: Path, version: Path
) -> None:
    change(version, REMOVED, "\n\n")
    again = calls(("update_section", section("abstract", "Again.")))
    with chat_server(says("done"), again, says("done")) as server:
        assert drafted(config(server.url), own, update=True).version == 2
        assert server.requests[1]["messages"][-1]["content"] == "not finished: abstract not written"
    assert "Again." in version.read_text()


def test_numbers_that_a_person_changed_are_kept_beside(config: Make, own: Path, version: Path) -> None:
    numbers = own / "paper/results.tex"
    original = numbers.read_text()
    numbers.write_text(original + "% mine\n")
    with chat_server(says("done")) as server:
        assert drafted(config(server.url), own, update=True).version == 1
    assert numbers.read_text() == original
    assert numbers.with_name("results.tex.edited-1").read_text() == original + "% mine\n"


def test_an_edit_has_one_budget_however_often_it_is_gone_on_with(config: Make, own: Path, version: Path) -> None:
    change(version, ABSTRACT, "Mine.")
    look, two = calls(("list_artifacts", {})), {"max_iterations": 2}
    with chat_server(*[look] * 9) as server:
        for _ in range(3):
            with pytest.raises(BudgetExceeded, match="max_iterations=2"):
                drafted(config(server.url, budget=two), own, update=True)
            assert len(server.requests) == 2
        change(version, "Mine.", "Mine, and more.")  # a new edit is a new draft
        with pytest.raises(BudgetExceeded, match="max_iterations=2"):
            drafted(config(server.url, budget=two), own, update=True)
        assert len(server.requests) == 4
    with chat_server(says("done")) as server:
        drafted(config(server.url), own, update=True)
        assert [item["role"] for item in server.requests[0]["messages"][2:]] == ["assistant", "tool"] * 2
    assert "Mine, and more." in version.read_text()


def test_an_edit_that_a_person_takes_back_is_gone(config: Make, own: Path, version: Path) -> None:
    original = version.read_text()
    change(version, ABSTRACT, "Mine.")
    with chat_server() as server, pytest.raises(AgentError):
        drafted(config(server.url), own, update=True)
    version.write_text(original)
    with chat_server(says("done")) as server:
        drafted(config(server.url), own, update=True)
    assert version.read_text() == original


def test_an_edit_is_taken_once_though_a_kill_kept_that_from_being_noted(
    config: Make, own: Path, version: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(version, ABSTRACT, "Mine.")
    with monkeypatch.context() as patch, chat_server(says("done")) as server:
        patch.setattr(Draft, "save", stopped_after_adoption(Draft.save))
        with pytest.raises(KeyboardInterrupt):
            drafted(config(server.url), own, update=True)
    with chat_server() as server:
        assert drafted(config(server.url), own, update=True).version == 2
        assert server.requests == []
    assert "Mine." in version.read_text()
    assert not list((own / "paper").glob("*.edited-*"))


def stopped_after_adoption(real: Callable[..., None]) -> Callable[..., None]:
    def save(self: Draft, file: Path) -> None:
        if not self.messages:
            raise KeyboardInterrupt
        real(self, file)

    return save


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (r"Mine.\vspace{2mm} Really.", r"(?s)what was edited cannot be kept as it is.*\\vspace is not a command"),
        ("{" * 3000, "what was edited cannot be kept as it is"),
        (r"As \citep{nobody2020} said.", "'nobody2020' is no citation"),
        ("Mine, which does not compile.", "the paper does not compile:\n! Undefined"),
    ],
)
def test_what_the_gate_refuses_of_a_person_is_told_to_the_person(
    words: str,
    message: str,
    config: Make,
    own: Path,
    version: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(version, ABSTRACT, words)
    if "compile" in words:
        monkeypatch.setattr(gate, "compile_paper", lambda files: Compiled(None, "! Undefined"))
    with chat_server(*[says("done")] * 5) as server:
        with pytest.raises(ConfigError, match=message):
            drafted(config(server.url), own, update=True)
        assert server.requests == []
    assert words in version.read_text()


def test_a_person_cites_an_entry_of_the_bibliography_by_its_key(
    config: Make, own: Path, version: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.bib").write_text("@misc{own2020, title={Own work}, author={A. Person}, year={2020}}\n")
    change(version, ABSTRACT, r"As \citep{own2020} said in 2020.")
    with chat_server(says("done")) as server:
        bibliography = {"bibliography": str(tmp_path / "mine.bib")}
        assert drafted(config(server.url, citations=bibliography), own, update=True).version == 2
    assert "own2020" in (own / "paper/references.bib").read_text()
