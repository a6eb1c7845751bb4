"""What a person does to a paper is kept as written, or refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_paper import ABSTRACT, RESULTS, drafted, hash_of, section, whole
from tests.paper_servers import calls, chat_server, says

from caramba.config.paper import PaperConfig
from caramba.errors import ConfigError

pytest.importorskip("litellm", reason="the extra `paper` is not installed")
pytestmark = pytest.mark.usefixtures("without_latex")

Make = Callable[..., PaperConfig]


def test_what_a_person_edited_is_kept(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    paper = own / "paper/paper.tex"
    paper.write_text(paper.read_text().replace(ABSTRACT, "My own words, with 42 numbers and \\emph{care}."))
    with chat_server(
        whole(),  # would overwrite what the person wrote
        calls(("update_section", {**section("results", RESULTS + " It is small."), "base_hash": "?"})),
        calls(("read_tex_file", {})),
        lambda request: calls(
            (
                "update_section",
                {**section("results", RESULTS + " It is small."), "base_hash": hash_of(request, "results")},
            )
        ),
        says("done"),
    ) as server:
        assert drafted(config(server.url), own, update=True).version == 2
        refused, stale, read, accepted = server.results()
    assert "abstract: edited by a person since" in refused["error"]
    assert "is not that of the section" in stale["error"]
    assert [item["by"] for item in read["sections"]] == ["human", "agent"]
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
    with chat_server(says("fine as it is"), calls(("read_tex_file", {})), lambda request: calls(
        ("update_section", {**section("results", RESULTS), "base_hash": hash_of(request, "results")})
    ), says("done")) as server:  # fmt: skip
        assert drafted(config(server.url), own, update=True).version == 2
        told_first = server.requests[0]["messages"][1]["content"]
        told_then = server.requests[1]["messages"][-1]["content"]
    assert "These no longer hold" in told_first
    assert "is no key of report.json" in told_then
