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
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.artifacts.latex import escape
from caramba.config.optional_deps import need_library
from caramba.config.paper import CitationsConfig, SourceName
from caramba.errors import AgentError, ConfigError
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
_BIB_KEY = re.compile(r"[A-Za-z0-9:._+/-]+")


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


def describe(
    identity: str, title: str, authors: Iterable[str], year: str, *, abstract: str = "", entry: str = "", **others: str
) -> Record:
    """Return a record of what others wrote, each text on one line and no longer than allowed."""
    people = tuple(clean(name, 200) for name in itertools.islice(authors, MOST_AUTHORS) if name.strip())
    rest = {name: clean(text, 200) for name, text in others.items()}
    abstract = clean(abstract, MOST_ABSTRACT)
    return Record(identity, clean(title, MOST_TITLE), people, year, abstract=abstract, entry=entry, **rest)


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
        entries = database.parse_string(path.read_text(encoding="utf-8"), "bibtex").entries
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the bibliography: {error}; give a UTF-8 .bib file") from None
    except importlib.import_module("pybtex.exceptions").PybtexError as error:
        raise ConfigError(f"{path}: not BibTeX: {error}; correct that entry") from None
    found: dict[str, Record] = {}
    for key, entry in entries.items():
        if not _BIB_KEY.fullmatch(key):
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
            found = [record for record in search(query, most) if record is not None and record.title][:most]
        except StatusError as error:
            many = " (too many requests)" if error.status_code == 429 else ""
            raise SearchFailed(f"{source}: HTTP {error.status_code}{many}; try again later or another source") from None
        except TimeoutError:
            raise SearchFailed(f"{source}: no answer within {self.config.timeout_s:g} s; try another source") from None
        except OSError as error:
            reason = getattr(error, "reason", None) or error
            raise SearchFailed(f"{source}: cannot be reached ({reason}); is this machine offline?") from None
        except (ET.ParseError, http.client.HTTPException, AgentError, ValueError, AttributeError, TypeError) as error:
            wrong = f"the answer is not what was expected ({type(error).__name__})"
            raise SearchFailed(f"{source}: {wrong}; try again or another source") from None
        newest = time.gmtime().tm_year - self.config.recent_years if self.config.prefer_recent else 9999
        return sorted(found, key=lambda record: not (record.year.isdigit() and int(record.year) > newest))

    def _arxiv(self, query: str, most: int) -> Iterable[Record | None]:
        wait = self._last_arxiv + ARXIV_PAUSE_S - time.monotonic()
        if wait > 0 and ARXIV_URL.startswith("https://export.arxiv.org"):
            self._sleep(wait)
        words = " AND ".join(f"all:{word}" for word in re.findall(r"[\w.-]+", query)[:12])
        content = self._fetch(ARXIV_URL, {"search_query": words, "max_results": str(most)}, {})
        self._last_arxiv = time.monotonic()
        return map(_of_entry, ET.fromstring(content).findall(f"{_ATOM}entry"))

    def _semantic_scholar(self, query: str, most: int) -> Iterable[Record | None]:
        asked = {"query": query, "limit": str(most), "fields": "title,abstract,year,venue,authors,externalIds"}
        key = os.environ.get(SEMANTIC_SCHOLAR_KEY)
        content = self._fetch(SEMANTIC_SCHOLAR_URL, asked, {"x-api-key": key} if key else {})
        return map(_of_paper, read_object(content.decode(errors="replace"), "semantic_scholar").get("data") or [])

    def _fetch(self, url: str, parameters: Mapping[str, str], headers: Mapping[str, str]) -> bytes:
        whole, timeout_s = f"{url}?{urllib.parse.urlencode(parameters)}", self.config.timeout_s
        return run_with_timeout(timeout_s, lambda: fetch(whole, headers, timeout_s=timeout_s))


def _of_entry(entry: ET.Element) -> Record | None:
    found = _ARXIV_ID.search(entry.findtext(f"{_ATOM}id", "").strip())
    if found is None:
        return None
    names = [author.findtext(f"{_ATOM}name", "") for author in entry.findall(f"{_ATOM}author")]
    year = entry.findtext(f"{_ATOM}published", "")[:4]
    return describe(
        f"arxiv:{found[1]}", entry.findtext(f"{_ATOM}title", ""), names, year if year.isdigit() else "",
        doi=entry.findtext(f"{_ARXIV}doi", ""), abstract=entry.findtext(f"{_ATOM}summary", ""),
    )  # fmt: skip


def _of_paper(paper: dict[str, Any]) -> Record | None:
    identity, year = str(paper.get("paperId") or ""), paper.get("year")
    if not _S2_ID.fullmatch(identity):
        return None
    names = [str(item.get("name") or "") for item in paper.get("authors") or []]
    texts = {name: str(paper.get(name) or "") for name in ("venue", "abstract")}
    doi = str((paper.get("externalIds") or {}).get("DOI") or "")
    title = str(paper.get("title") or "")
    return describe(f"s2:{identity}", title, names, str(year) if isinstance(year, int) else "", doi=doi, **texts)
