"""Works that may be cited: records that arXiv, Semantic Scholar or a .bib file hold. Code writes their BibTeX.

Text of a source is only text. A source that cannot be searched gives the reason.
"""

from __future__ import annotations

import http.client
import importlib
import itertools
import os
import re
import time
import unicodedata
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.artifacts.latex import escape
from caramba.config.optional_deps import need_library
from caramba.config.paper import CitationsConfig, SourceName
from caramba.errors import AgentError, ConfigError
from caramba.paper.untrusted import clean, read_json
from caramba.runs.deadline import run_with_timeout

_KEY = re.compile(r"[A-Za-z0-9:._+/-]+")
MOST_TITLE, MOST_ABSTRACT, MOST_AUTHORS = 300, 3000, 50
ARXIV_URL = "https://export.arxiv.org/api/query"
SEMANTIC_SCHOLAR_URL = "https://api.semanticscholar.org/graph/v1/paper/search"
SEMANTIC_SCHOLAR_KEY = "SEMANTIC_SCHOLAR_API_KEY"

MOST_BYTES, MOST_RECORDS, MOST_FAILURES = 4_000_000, 20, 3
ARXIV_PAUSE_S = 3.0  # what arXiv asks of its users
_ATOM, _ARXIV = "{http://www.w3.org/2005/Atom}", "{http://arxiv.org/schemas/atom}"
_ARXIV_ID = re.compile(r"arxiv\.org/abs/([A-Za-z0-9./-]+?)(?:v\d+)?$")
_S2_ID = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Record:
    """A work as its source describes it. `id` is `arxiv:…`, `s2:…` or `bib:KEY`; `entry` is a user's own BibTeX."""

    id: str
    title: str
    authors: tuple[str, ...]
    year: str
    venue: str = ""
    url: str = ""
    doi: str = ""
    abstract: str = ""
    entry: str = ""

    def states(self, value: str) -> bool:
        """Whether a number is in the abstract as it is written, not inside a longer one."""
        wanted = value.strip()
        has_digit = any(letter.isdigit() for letter in wanted)
        pattern = rf"(?<![\d.,]){re.escape(wanted)}(?![\d]|[.,]\d)"
        return has_digit and re.search(pattern, self.abstract) is not None

    def bibtex(self, key: str) -> str:
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
        return f"% {self.id}\n@misc{{{key},\n" + ",\n".join(lines) + "\n}\n"


def describe(identity: str, title: str, authors: Iterable[str], year: str, *, entry: str = "", **others: str) -> Record:
    """Return a record of what others wrote, each text on one line and no longer than allowed."""
    people = tuple(clean(name, 200) for name in itertools.islice(authors, MOST_AUTHORS) if name.strip())
    most = {"abstract": MOST_ABSTRACT}
    rest = {name: clean(text, most.get(name, 200)) for name, text in others.items()}
    return Record(identity, clean(title, MOST_TITLE), people, year, entry=entry, **rest)


def new_key(record: Record, taken: Collection[str]) -> str:
    """Return a citation key: first author, year and first long word of the title, made distinct."""
    if record.id.startswith("bib:"):
        return record.id.removeprefix("bib:")
    author = " ".join(record.authors[:1]).split() or ["anon"]
    word = next((word for word in re.findall(r"\w+", record.title) if len(word) > 3), "work")
    base = _ascii(author[-1]) + record.year + _ascii(word) or "work"
    keys = (base + (f"x{number}" if number > 1 else "") for number in itertools.count(1))
    return next(key for key in keys if key not in taken)


def read_bibliography(path: Path) -> dict[str, Record]:
    """Read the entries of a .bib file, by `bib:KEY`.

    Raises:
        ConfigError: no such file, one that pybtex cannot read, or a key that no command can name.
    """
    need_library("pybtex", "paper", "paper.citations.bibliography")
    database: Any = importlib.import_module("pybtex.database")
    try:
        text = path.read_text(encoding="utf-8")
        entries = database.parse_string(text, "bibtex").entries
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the bibliography: {error}; give a UTF-8 .bib file") from None
    except importlib.import_module("pybtex.exceptions").PybtexError as error:
        raise ConfigError(f"{path}: not BibTeX: {error}; correct that entry") from None
    found: dict[str, Record] = {}
    for key, entry in entries.items():
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{path}: key {key!r}; expected letters, digits and : . _ + / -")
        fields = {name.lower(): re.sub("[{}]", "", value) for name, value in entry.fields.items()}
        year = re.search(r"\d{4}", fields.get("year", "") or fields.get("date", ""))
        people = [" ".join(person.first_names + person.middle_names + person.prelast_names + person.last_names)
                  for person in entry.persons.get("author", ())]  # fmt: skip
        found[f"bib:{key}"] = describe(
            f"bib:{key}", fields.get("title", ""), [re.sub("[{}]", "", name) for name in people],
            year[0] if year else "", abstract=fields.get("abstract", ""), entry=entry.to_string("bibtex"),
        )  # fmt: skip
    return found


def _plain(text: str) -> str:
    """Return text as TeX, without braces: BibTeX counts them even behind a backslash."""
    return escape(re.sub(r"[{}]", "", text))


def _person(name: str) -> str:
    """Return a name for BibTeX to parse, or in braces where it would find a list or a comma in it."""
    is_simple = re.fullmatch(r"[^\W\d_]+(?:[ .'-]+[^\W\d_]+)*\.?", name) and " and " not in name.lower()
    return _plain(name) if is_simple else f"{{{_plain(name)}}}"


def _ascii(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]", "", plain.lower())


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
        asked = {"query": query, "limit": str(most), "fields": fields}
        key = os.environ.get(SEMANTIC_SCHOLAR_KEY)
        content = self._get("semantic_scholar", SEMANTIC_SCHOLAR_URL, asked, {"x-api-key": key} if key else {})
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
