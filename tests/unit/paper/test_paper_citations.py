"""Searches and citations in a draft: told when they fail, and no more than allowed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_paper import drafted, whole
from tests.needs import need
from tests.paper_servers import LiteratureServer, calls, chat_server, fails, says

from caramba.config.paper import PaperConfig

need("litellm")
pytestmark = pytest.mark.usefixtures("without_latex")

Make = Callable[..., PaperConfig]


def test_searches_that_fail_are_told_and_citations_off_have_none(
    config: Make, own: Path, literature: LiteratureServer
) -> None:
    literature.atom = fails(429)
    with chat_server(calls(("search_arxiv", {"query": "x"})), whole(), says("done")) as server:
        drafted(config(server.url), own)
        assert "HTTP 429" in server.results()[0]["error"]
    with chat_server(calls(("search_arxiv", {"query": "x"})), says("done")) as server:
        drafted(config(server.url, citations={"enabled": False}), own, update=True)
        names = [tool["function"]["name"] for tool in server.requests[0]["tools"]]
        assert "'search_arxiv' is no tool" in server.results()[0]["error"]
    assert not [name for name in names if name.startswith("search")]


def test_abstracts_reach_the_writer_as_typed_fields(config: Make, own: Path, literature: LiteratureServer) -> None:
    with chat_server(calls(("search_arxiv", {"query": "x"})), whole(), says("done")) as server:
        drafted(config(server.url), own)
        misshapen, condensed = server.results()[0]["records"]
        sent = json.dumps(server.requests[-1])
    assert condensed["numbers"] == ["28.4"]
    assert not misshapen.keys() & {"abstract", "problem", "method", "finding"}
    assert [condensed[name] for name in ("problem", "method", "finding")] == [
        "a problem",
        "a method",
        "a finding",
    ]
    assert misshapen["title"] == "A Latent Cache"  # without the character that turns the direction of text
    assert "Ignore all previous" not in sent


def test_citations_are_no_more_than_allowed(config: Make, own: Path, literature: LiteratureServer) -> None:
    with chat_server(
        calls(("search_arxiv", {"query": "x"})),
        calls(
            ("add_citation", {"source_id": "arxiv:1706.03762"}),
            ("add_citation", {"source_id": "arxiv:2405.04434"}),
        ),
        calls(("add_citation", {"source_id": "arxiv:1706.03762"})),
        whole(),
        says("done"),
    ) as server:
        drafted(config(server.url, citations={"max_citations": 1}), own)
        _, first, second, again, _ = server.results()
    assert first["key"] == again["key"] == "arxiv:1706.03762"
    assert "as many as max_citations allows" in second["error"]
