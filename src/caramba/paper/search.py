"""arXiv and Semantic Scholar over HTTP: records, or the reason why there are none. Text of theirs is only text."""

from __future__ import annotations

import http.client
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

from caramba.config.paper import CitationsConfig, SourceName
from caramba.errors import AgentError
from caramba.paper.records import Record, describe
from caramba.paper.untrusted import read_json
from caramba.runs.deadline import run_with_timeout

ARXIV_URL = "https://export.arxiv.org/api/query"
SEMANTIC_SCHOLAR_URL = "https://api.semanticscholar.org/graph/v1/paper/search"
SEMANTIC_SCHOLAR_KEY = "SEMANTIC_SCHOLAR_API_KEY"

MOST_BYTES, MOST_RECORDS, MOST_FAILURES = 4_000_000, 20, 3
ARXIV_PAUSE_S = 3.0  # what arXiv asks of its users
_ATOM, _ARXIV = "{http://www.w3.org/2005/Atom}", "{http://arxiv.org/schemas/atom}"
_ARXIV_ID = re.compile(r"arxiv\.org/abs/([A-Za-z0-9./-]+?)(?:v\d+)?$")
_S2_ID = re.compile(r"[0-9a-f]{40}")


class SearchFailed(AgentError):  # noqa: N818 - names the event
    """A source could not be searched; the message is for the model, which continues with what it has."""


class Literature:
    """Searches the sources that a draft may use, and stops asking one that keeps failing."""

    def __init__(self, config: CitationsConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config, self._sleep = config, sleep
        self._failures: dict[SourceName, int] = {}
        self._last_arxiv = -ARXIV_PAUSE_S

    def search(self, source: SourceName, query: str, most: int) -> list[Record]:
        """Return at most `most` records, newer ones first where the configuration prefers them.

        Raises:
            SearchFailed: the source is off, down, slow, or answers what cannot be read.
        """
        if not self.config.enabled or source not in self.config.sources:
            raise SearchFailed(f"{source} is not among paper.citations.sources; cite without it")
        if self._failures.get(source, 0) >= MOST_FAILURES:
            raise SearchFailed(f"{source} failed {MOST_FAILURES} times in this draft and is not asked again")
        ask = self._arxiv if source == "arxiv" else self._semantic_scholar
        try:
            found = ask(query, min(most, MOST_RECORDS))
        except SearchFailed:
            self._failures[source] = self._failures.get(source, 0) + 1
            raise
        self._failures[source] = 0
        newest = time.gmtime().tm_year - self.config.recent_years if self.config.prefer_recent else 9999
        return sorted(found, key=lambda record: not (record.year.isdigit() and int(record.year) > newest))

    def _arxiv(self, query: str, most: int) -> list[Record]:
        wait = self._last_arxiv + ARXIV_PAUSE_S - time.monotonic()
        if wait > 0 and ARXIV_URL.startswith("https://export.arxiv.org"):
            self._sleep(wait)
        words = " AND ".join(f"all:{word}" for word in re.findall(r"[\w.-]+", query)[:12])
        if not words:
            raise SearchFailed(f"arxiv: query {query!r} holds no word; give a few technical words")
        content = self._get("arxiv", ARXIV_URL, {"search_query": words, "max_results": str(most)}, {})
        self._last_arxiv = time.monotonic()
        if b"<!DOCTYPE" in content or b"<!ENTITY" in content:
            raise SearchFailed("arxiv: the answer declares entities and is not read; try semantic_scholar")
        try:
            entries = ET.fromstring(content).findall(f"{_ATOM}entry")
        except ET.ParseError as error:
            raise SearchFailed(f"arxiv: the answer is no XML ({error}); try semantic_scholar") from None
        return [record for entry in entries if (record := _of_entry(entry)) and record.title][:most]

    def _semantic_scholar(self, query: str, most: int) -> list[Record]:
        fields = "title,abstract,year,venue,authors,externalIds,url"
        key = os.environ.get(SEMANTIC_SCHOLAR_KEY)
        content = self._get(
            "semantic_scholar",
            SEMANTIC_SCHOLAR_URL,
            {"query": query, "limit": str(most), "fields": fields},
            {"x-api-key": key} if key else {},
        )
        try:
            papers = read_json(content).get("data") or []
            return [record for paper in papers if (record := _of_paper(paper)) and record.title][:most]
        except (ValueError, AttributeError, TypeError) as error:
            raise SearchFailed(
                f"semantic_scholar: the answer is not what was expected ({type(error).__name__}); try again or arxiv"
            ) from None

    def _get(self, source: str, url: str, parameters: dict[str, str], headers: dict[str, str]) -> bytes:
        request = urllib.request.Request(
            f"{url}?{urllib.parse.urlencode(parameters)}", headers={"User-Agent": "caramba", **headers}
        )

        def read() -> bytes:
            with urllib.request.urlopen(request, timeout=self.config.timeout_s) as answer:
                return answer.read(MOST_BYTES + 1)

        try:
            content = run_with_timeout(self.config.timeout_s, read)
        except (http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", None) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError):
                wrong = f"HTTP {error.code}{' (too many requests)' if error.code == 429 else ''}"
            elif isinstance(error, TimeoutError) or isinstance(reason, TimeoutError):
                wrong = f"no answer within {self.config.timeout_s:g} s"
            else:
                wrong = f"cannot be reached ({reason}); is this machine offline?"
            raise SearchFailed(f"{source}: {wrong}; try again later or another source") from None
        if len(content) > MOST_BYTES:
            raise SearchFailed(f"{source}: the answer is longer than {MOST_BYTES} bytes; search narrower")
        return content


def _of_entry(entry: ET.Element) -> Record | None:
    found = _ARXIV_ID.search(entry.findtext(f"{_ATOM}id", "").strip())
    if found is None:
        return None
    names = [author.findtext(f"{_ATOM}name", "") for author in entry.findall(f"{_ATOM}author")]
    year = entry.findtext(f"{_ATOM}published", "")[:4]
    return describe(
        f"arxiv:{found[1]}", entry.findtext(f"{_ATOM}title", ""), names, year if year.isdigit() else "",
        url=f"https://arxiv.org/abs/{found[1]}", doi=entry.findtext(f"{_ARXIV}doi", ""),
        abstract=entry.findtext(f"{_ATOM}summary", ""),
    )  # fmt: skip


def _of_paper(paper: dict[str, Any]) -> Record | None:
    identity, year = str(paper.get("paperId") or ""), paper.get("year")
    if not _S2_ID.fullmatch(identity):
        return None
    names = [str(item.get("name") or "") for item in paper.get("authors") or []]
    texts = {name: str(paper.get(name) or "") for name in ("venue", "abstract")}
    return describe(
        f"s2:{identity}", str(paper.get("title") or ""), names, str(year) if isinstance(year, int) else "",
        url=f"https://www.semanticscholar.org/paper/{identity}",
        doi=str((paper.get("externalIds") or {}).get("DOI") or ""), **texts,
    )  # fmt: skip
