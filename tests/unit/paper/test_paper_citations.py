"""Searches and citations in a draft: told when they fail, and no more than allowed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_paper import drafted, whole
from tests.paper_servers import LiteratureServer, calls, chat_server, fails, says

from caramba.config.paper import PaperConfig

pytest.importorskip("litellm", reason="the extra `paper` is not installed")
pytestmark = pytest.mark.usefixtures("without_latex")

Make = Callable[..., PaperConfig]


def test_searches_that_fail_are_told_and_citations_off_have_none(
    config: Make, own: Path, literature: LiteratureServer
) -> None:
    literature.atom = fails(429)
    with chat_server(calls(("search_arxiv", {"query": "x"})), whole(), says("done")) as server:
        drafted(config(server.url), own)
        assert "HTTP 429 (too many requests)" in server.results()[0]["error"]
    with chat_server(calls(("search_arxiv", {"query": "x"})), says("done")) as server:
        drafted(config(server.url, citations={"enabled": False}), own, update=True)
        names = [tool["function"]["name"] for tool in server.requests[0]["tools"]]
        assert "there is no tool 'search_arxiv'" in server.results()[0]["error"]
    assert not [name for name in names if name.startswith("search")]


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
    assert first["key"] == again["key"] == "vaswani2017attention"
    assert "as many as max_citations allows" in second["error"]
