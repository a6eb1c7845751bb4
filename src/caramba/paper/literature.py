"""Works that may be cited: records that arXiv, Semantic Scholar or a .bib file hold. Code writes their BibTeX.

Text of a source is only text. A source that cannot be searched gives the reason.
"""

from __future__ import annotations

import dataclasses
import http.client
import importlib
import itertools
import os
import re
import time
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.artifacts.latex import escape
from caramba.config.optional_deps import need_library
from caramba.config.paper import CitationsConfig, SourceName
from caramba.errors import AgentError, ConfigError, fits_header
from caramba.paper.untrusted import StatusError, clean, fetch, read_object
from caramba.runs.deadline import run_with_timeout

MOST_TITLE, MOST_ABSTRACT, MOST_AUTHORS = 300, 3000, 50
ARXIV_URL = "https://export.arxiv.org/api/query"
SEMANTIC_SCHOLAR_URL = "https://api.semanticscholar.org/graph/v1/paper/search"
SEMANTIC_SCHOLAR_KEY = "SEMANTIC_SCHOLAR_API_KEY"
ARXIV_PAUSE_S = 3.0  # what arXiv asks of its users
_ATOM, _ARXIV = "{http://www.w3.org/2005/Atom}", "{http://arxiv.org/schemas/atom}"
_ARXIV_ID = re.compile(r"arxiv\.org/abs/([A-Za-z0-9./-]+?)(?:v\d+)?$")
_S2_ID = re.compile(r"[0-9a-f]{40}")
_UNREADABLE = (ET.ParseError, http.client.HTTPException, ValueError, AttributeError, TypeError)


@dataclass(frozen=True)
class Record:
    """A work as its source describes it. `id` is `arxiv:…`, `s2:…` or `bib:KEY`; `entry` is a user's own BibTeX."""

    id: str
    title: str
    authors: tuple[str, ...]
    year: str
    venue: str = ""
    doi: str = ""
    abstract: str = ""
    entry: str = ""

    @property
    def key(self) -> str:
        """What a paper cites it by."""
        return self.id.removeprefix("bib:")

    def states(self, value: str) -> bool:
        """Whether a number is in the abstract as it is written, not inside a longer one."""
        wanted = value.strip()
        has_digit = any(letter.isdigit() for letter in wanted)
        pattern = rf"(?<![\d.,]){re.escape(wanted)}(?![\d]|[.,]\d)"
        return has_digit and re.search(pattern, self.abstract) is not None

    def bibtex(self) -> str:
        """Return the entry, every character of it printed as itself."""
        if self.entry:
            return self.entry
        fields = {
            "title": f"{{{_plain(self.title)}}}",
            "author": " and ".join(_person(name) for name in self.authors),
            "year": self.year,
            "howpublished": _plain(self.venue or ("arXiv:" + self.id[6:] if self.id.startswith("arxiv:") else "")),
            "note": f"DOI {_plain(self.doi)}" if self.doi else "",
        }
        lines = [f"  {name} = {{{value}}}" for name, value in fields.items() if value]
        return f"@misc{{{self.key},\n" + ",\n".join(lines) + "\n}\n"


def describe(identity: str, title: str, authors: Iterable[str], year: object, **others: str) -> Record:
    """Return a record of what others wrote, each text on one line and no longer than allowed."""
    people = tuple(clean(name, 200) for name in itertools.islice(authors, MOST_AUTHORS) if name.strip())
    rest = {name: clean(text, MOST_ABSTRACT if name == "abstract" else 200) for name, text in others.items()}
    found = re.match(r"[0-9]{4}", str(year))
    return Record(identity, clean(title, MOST_TITLE), people, found[0] if found else "", **rest)


def read_bibliography(path: Path) -> dict[str, Record]:
    """Read the entries of a .bib file, by `bib:KEY`.

    Raises:
        ConfigError: no such file, or one that pybtex cannot read.
    """
    need_library("pybtex", "paper", "paper.citations.bibliography")
    database: Any = importlib.import_module("pybtex.database")
    try:
        entries = database.parse_string(path.read_text(encoding="utf-8"), "bibtex").entries
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the bibliography: {error}; give a UTF-8 .bib file") from None
    except importlib.import_module("pybtex.exceptions").PybtexError as error:
        raise ConfigError(f"{path}: not BibTeX: {error}; correct that entry") from None
    found: dict[str, Record] = {}
    for key, entry in entries.items():
        title, year, date, abstract = (re.sub("[{}]", "", entry.fields.get(name, ""))
                                       for name in ("title", "year", "date", "abstract"))  # fmt: skip
        record = describe(f"bib:{key}", title, (), year or date, abstract=abstract)
        found[record.id] = dataclasses.replace(record, entry=entry.to_string("bibtex"))
    return found


def _plain(text: str) -> str:
    """Return text as TeX, without braces: BibTeX counts them even behind a backslash."""
    return escape(re.sub(r"[{}]", "", text))


def _person(name: str) -> str:
    """Return a name for BibTeX to parse, or in braces where it would find a list or a comma in it."""
    is_simple = re.fullmatch(r"[^\W\d_]+(?:[ .'-]+[^\W\d_]+)*\.?", name) and " and " not in name.lower()
    return _plain(name) if is_simple else f"{{{_plain(name)}}}"


class SearchFailed(AgentError):  # noqa: N818 - names the event
    """A source could not be searched; the message is for the model, which continues with what it has."""


class Literature:
    """Searches the sources that a draft may use."""

    def __init__(self, config: CitationsConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.config, self._sleep = config, sleep
        self._last_arxiv = -ARXIV_PAUSE_S

    def search(self, source: SourceName, query: str, most: int) -> list[Record]:
        """Return at most `most` records, newer ones first where the configuration prefers them.

        Raises:
            SearchFailed: the source is down, slow, or answers what cannot be read.
        """
        search = self._arxiv if source == "arxiv" else self._semantic_scholar
        try:
            found = [record for record in search(query, most) if record.title][:most]
        except (*_UNREADABLE, OSError, AgentError) as error:
            # What a server writes with a status is not shown to the model.
            shown = (
                f"HTTP {error.status_code}" if isinstance(error, StatusError) else f"{type(error).__name__}: {error}"
            )
            raise SearchFailed(f"{source}: {shown[:300]}; try again later, another source, or without") from None
        newest = time.gmtime().tm_year - self.config.recent_years if self.config.prefer_recent else 9999
        return sorted(found, key=lambda record: not (record.year.isdigit() and int(record.year) > newest))

    def _arxiv(self, query: str, most: int) -> Iterator[Record]:
        wait = self._last_arxiv + ARXIV_PAUSE_S - time.monotonic()
        if wait > 0 and ARXIV_URL.startswith("https://export.arxiv.org"):
            self._sleep(wait)
        words = " AND ".join(f"all:{word}" for word in re.findall(r"[\w.-]+", query)[:12])
        content = self._fetch(ARXIV_URL, {"search_query": words, "max_results": str(most)}, {})
        self._last_arxiv = time.monotonic()
        for entry in ET.fromstring(content).findall(f"{_ATOM}entry"):
            place, title, year, abstract = (entry.findtext(_ATOM + name, "").strip()
                                            for name in ("id", "title", "published", "summary"))  # fmt: skip
            names = [author.findtext(f"{_ATOM}name", "") for author in entry.findall(f"{_ATOM}author")]
            if found := _ARXIV_ID.search(place):
                doi = entry.findtext(f"{_ARXIV}doi", "")
                yield describe(f"arxiv:{found[1]}", title, names, year, doi=doi, abstract=abstract)

    def _semantic_scholar(self, query: str, most: int) -> Iterator[Record]:
        asked = {"query": query, "limit": str(most), "fields": "title,abstract,year,venue,authors,externalIds"}
        key = os.environ.get(SEMANTIC_SCHOLAR_KEY, "").strip()
        if key and not fits_header(key):
            raise AgentError(f"{SEMANTIC_SCHOLAR_KEY} holds characters that a header cannot carry")
        content = self._fetch(SEMANTIC_SCHOLAR_URL, asked, {"x-api-key": key} if key else {})
        for paper in read_object(content.decode(errors="replace"), "the answer").get("data") or []:
            texts = {name: str(paper.get(name) or "") for name in ("paperId", "title", "venue", "abstract")}
            identity, title = texts.pop("paperId"), texts.pop("title")
            names = [str(item.get("name") or "") for item in paper.get("authors") or []]
            doi = str((paper.get("externalIds") or {}).get("DOI") or "")
            if _S2_ID.fullmatch(identity):
                yield describe(f"s2:{identity}", title, names, paper.get("year"), doi=doi, **texts)

    def _fetch(self, url: str, parameters: Mapping[str, str], headers: Mapping[str, str]) -> bytes:
        whole, timeout_s = f"{url}?{urllib.parse.urlencode(parameters)}", self.config.timeout_s
        return run_with_timeout(timeout_s, lambda: fetch(whole, headers, timeout_s=timeout_s))
