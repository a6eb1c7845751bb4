"""Works that may be cited: records that a search returned or a .bib file holds. Code writes their BibTeX."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from caramba.artifacts.latex import escape
from caramba.errors import ConfigError

_ENTRY = re.compile(r"@\s*([A-Za-z]+)\s*\{")
_KEY = re.compile(r"[A-Za-z0-9:._+/-]+")
_FIELD = re.compile(r"\b(title|author|year|date|abstract)\s*=\s*", re.IGNORECASE)
_PASSED_OVER = frozenset({"comment", "preamble", "string"})
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


def clean(text: str, most: int) -> str:
    """Return text of others on one line: no control, direction or zero-width characters, and no more than `most`."""
    kept = (" " if letter.isspace() else letter for letter in unicodedata.normalize("NFC", text))
    shown = "".join(letter for letter in kept if unicodedata.category(letter)[0] != "C")
    shown = " ".join(shown.split())
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def new_key(record: Record, taken: Collection[str]) -> str:
    """Return a citation key: first author, year and first long word of the title, made distinct."""
    if record.id.startswith("bib:"):
        return record.id.removeprefix("bib:")
    author = record.authors[0].split()[-1] if record.authors and record.authors[0].split() else "anon"
    word = next((word for word in re.findall(r"\w+", record.title) if len(word) > 3), "work")
    base = _ascii(author) + record.year + _ascii(word) or "work"
    number = 1
    while (key := base + (f"x{number}" if number > 1 else "")) in taken:
        number += 1
    return key


def read_bibliography(path: Path) -> dict[str, Record]:
    """Read the entries of a .bib file, by `bib:KEY`.

    Raises:
        ConfigError: no such file, an entry that does not end, or a key that occurs twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the bibliography: {error}; give a UTF-8 .bib file") from None
    found: dict[str, Record] = {}
    for line, entry in _entries(text, path):
        key = entry.partition("{")[2].partition(",")[0].strip()
        if not _KEY.fullmatch(key):
            raise ConfigError(f"{path}:{line}: key {key!r}; expected letters, digits and : . _ + / -")
        if f"bib:{key}" in found:
            raise ConfigError(f"{path}:{line}: two entries are called {key!r}; keys are distinct")
        fields = dict(_fields(entry))
        year = re.search(r"\d{4}", fields.get("year", "") or fields.get("date", ""))
        found[f"bib:{key}"] = Record(
            id=f"bib:{key}",
            title=clean(fields.get("title", ""), MOST_TITLE),
            authors=tuple(
                clean(name, 200) for name in fields.get("author", "").split(" and ") if name.strip()
            ),
            year=year[0] if year else "",
            abstract=clean(fields.get("abstract", ""), MOST_ABSTRACT),
            entry=entry + "\n",
        )
    return found


def _entries(text: str, path: Path) -> Iterator[tuple[int, str]]:
    at = 0
    while found := _ENTRY.search(text, at):
        line = text.count("\n", 0, found.start()) + 1
        end = _closing(text, found.end())
        if end is None:
            raise ConfigError(f"{path}:{line}: the entry does not end; close its brace")
        if found[1].lower() not in _PASSED_OVER:
            yield line, text[found.start() : end]
        at = end


def _fields(entry: str) -> Iterator[tuple[str, str]]:
    for found in _FIELD.finditer(entry):
        rest = entry[found.end() :]
        if rest.startswith("{"):
            end = _closing(rest, 1)
            value = rest[1 : end - 1] if end else ""
        elif rest.startswith('"'):
            value = rest[1:].partition('"')[0]
        else:
            value = re.split(r"[,}\n]", rest, maxsplit=1)[0]
        yield found[1].lower(), value.replace("{", "").replace("}", "")


def _closing(text: str, at: int) -> int | None:
    """Return the place behind the brace that closes the one before `at`."""
    depth = 1
    for index in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    return None


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
