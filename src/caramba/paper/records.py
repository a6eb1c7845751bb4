"""Works that may be cited: records that a search returned or a .bib file holds. Code writes their BibTeX."""

from __future__ import annotations

import importlib
import itertools
import re
import unicodedata
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.artifacts.latex import escape
from caramba.config.optional_deps import need_library
from caramba.errors import ConfigError
from caramba.paper.untrusted import clean

_KEY = re.compile(r"[A-Za-z0-9:._+/-]+")
MOST_TITLE, MOST_ABSTRACT, MOST_AUTHORS = 300, 3000, 50


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
            "howpublished": _plain(
                self.venue or ("arXiv:" + self.id[6:] if self.id.startswith("arxiv:") else "")
            ),
            "note": f"DOI {_plain(self.doi)}" if self.doi else "",
        }
        lines = [f"  {name} = {{{value}}}" for name, value in fields.items() if value]
        return f"% {self.id}\n@misc{{{key},\n" + ",\n".join(lines) + "\n}\n"


def describe(
    identity: str,
    title: str,
    authors: Iterable[str],
    year: str,
    *,
    abstract: str = "",
    entry: str = "",
    **others: str,
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
        people = [" ".join(part for name in (person.first_names, person.middle_names, person.prelast_names,
                                             person.last_names) for part in name)
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
