"""Searches against servers on loopback: what they answer becomes records, or a reason."""

from __future__ import annotations

import socket
import time

import pytest
from tests.paper_servers import ATOM, Answer, LiteratureServer, dripping_server

from caramba.config.paper import CitationsConfig, SourceName
from caramba.paper import literature as module
from caramba.paper.literature import Literature, SearchFailed
from caramba.paper.untrusted import MOST_BYTES


def test_arxiv_answers_become_records(literature: LiteratureServer) -> None:
    found = Literature(CitationsConfig(prefer_recent=False)).search("arxiv", "attention & caches", 5)
    assert literature.queries == [{"search_query": ["all:attention AND all:caches"], "max_results": ["5"]}]
    assert [record.id for record in found] == ["arxiv:1706.03762", "arxiv:2405.04434"]
    first, second = found
    assert (first.title, first.year) == ("Attention Is All You Need & 50% More", "2017")
    assert first.authors == ("Ashish Vaswani", "Noam Shazeer")
    assert first.states("28.4")
    assert second.title == "A Latent Cache"  # without the character that turns text around


def test_recent_works_come_first_if_asked(literature: LiteratureServer) -> None:
    found = Literature(CitationsConfig(recent_years=5)).search("arxiv", "attention", 5)
    assert [record.year for record in found] == ["2024", "2017"]


def test_semantic_scholar_answers_become_records(literature: LiteratureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = Literature(CitationsConfig()).search("semantic_scholar", "grouped", 3)
    assert found.id == "s2:" + "a" * 40
    assert (found.title, found.year, found.venue, found.doi) == (
        "Grouped Queries",
        "2023",
        "EMNLP",
        "10.1/abc",
    )


BAD = [
    ("arxiv", Answer(b"<feed", 200), "ParseError"),
    ("arxiv", Answer(b"", 429), "HTTP 429"),
    ("arxiv", Answer(b"", 403), "HTTP 403"),
    ("arxiv", Answer(b"", 302, {"Location": "file:///etc/passwd"}), "arxiv"),
    ("arxiv", Answer(ATOM.encode(), delay_s=1.5), "no answer within 0.5 s|timed out"),
    ("arxiv", Answer(b"x" * (MOST_BYTES + 1)), "longer than"),
    ("semantic_scholar", Answer(b"not json"), "not readable as JSON"),
    ("semantic_scholar", Answer(b"[1]"), "expected a JSON object"),
    ("semantic_scholar", Answer(b'{"data": ["x"]}'), "AttributeError"),
    ("semantic_scholar", Answer(b"", 500), "HTTP 500"),
]


@pytest.mark.parametrize(("source", "answer", "message"), BAD)
def test_a_bad_answer_is_a_reason(
    source: SourceName, answer: Answer, message: str, literature: LiteratureServer
) -> None:
    literature.atom = literature.scholar = answer
    with pytest.raises(SearchFailed, match=message):
        Literature(CitationsConfig(timeout_s=0.5)).search(source, "attention", 5)


def test_no_results_are_no_error(literature: LiteratureServer) -> None:
    literature.atom = Answer(b'<feed xmlns="http://www.w3.org/2005/Atom"/>')
    literature.scholar = Answer(b'{"total": 0}')
    asked = Literature(CitationsConfig())
    assert asked.search("arxiv", "nothing", 5) == asked.search("semantic_scholar", "nothing", 5) == []


def test_records_without_an_id_are_left_out(literature: LiteratureServer) -> None:
    literature.scholar = Answer(b'{"data": [{"paperId": "../x", "title": "T"}, {"paperId": null, "title": "T"}]}')
    assert Literature(CitationsConfig()).search("semantic_scholar", "x", 5) == []


def test_a_source_that_is_down_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(module, "ARXIV_URL", f"http://127.0.0.1:{port}/arxiv")
    with pytest.raises(SearchFailed, match=r"URLError: .*refused.*; try again later"):
        Literature(CitationsConfig()).search("arxiv", "x", 5)


def test_arxiv_is_asked_at_the_pace_it_wishes(literature: LiteratureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    asked = Literature(CitationsConfig(), sleep=waits.append)
    asked.search("arxiv", "x", 5)
    asked._last_arxiv = time.monotonic()
    monkeypatch.setattr(module, "ARXIV_URL", "https://export.arxiv.org.invalid/")
    with pytest.raises(SearchFailed):
        asked.search("arxiv", "x", 5)
    assert len(waits) == 1
    assert 2 < waits[0] <= module.ARXIV_PAUSE_S


def test_a_server_that_drips_runs_into_the_limit(literature: LiteratureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte every tenth of a second never makes one read late."""
    for part in ("body", "headers"):
        with dripping_server(part) as url:
            monkeypatch.setattr(module, "ARXIV_URL", url)
            began = time.monotonic()
            with pytest.raises(SearchFailed, match=r"no answer within 0\.5 s|timed out"):
                Literature(CitationsConfig(timeout_s=0.5)).search("arxiv", "x", 5)
            assert time.monotonic() - began < 60  # it never ends


def test_half_a_surrogate_pair_is_replaced(literature: LiteratureServer) -> None:
    paper = '{"paperId": "' + "a" * 40 + '", "title": "A \\ud83d title \\ud83d\\ude00"}'
    literature.scholar = Answer(b'{"data": [' + paper.encode() + b"]}")
    (found,) = Literature(CitationsConfig()).search("semantic_scholar", "x", 5)
    assert found.title == "A ? title \U0001f600"
