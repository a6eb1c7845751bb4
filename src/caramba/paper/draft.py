"""The state of a draft between two steps, as draft.json holds it: sections, citations, conversation, spending."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from caramba.errors import ConfigError
from caramba.paper.budget import Spent
from caramba.paper.records import Record
from caramba.runs.files import write_json

AGENT, HUMAN = "agent", "human"
SCHEMA = 1


@dataclass(frozen=True)
class Section:
    """The body of a section and who wrote it last: `agent` or `human`."""

    body: str
    by: str = AGENT

    @property
    def hash(self) -> str:
        """What names this body to a model that changes it."""
        return hashlib.sha256(self.body.encode()).hexdigest()[:12]


@dataclass
class Draft:
    """A draft at work. `is_open` until its version is adopted; `messages` is the conversation so far.

    `taken` are the sections of the edited paper.tex that was taken over last: an edit of version `taken_from` whose
    hash is `taken_sha256`.
    """

    sections: dict[str, Section] = field(default_factory=lambda: {})
    records: dict[str, Record] = field(default_factory=lambda: {})
    cited: dict[str, str] = field(default_factory=lambda: {})
    messages: list[dict[str, Any]] = field(default_factory=lambda: [])
    spent: Spent = field(default_factory=Spent)
    is_open: bool = False
    run_id: str = ""
    group: str = ""
    report_sha256: str = ""
    opening_sha256: str = ""
    taken_from: int = 0
    taken_sha256: str = ""
    taken: dict[str, str] = field(default_factory=lambda: {})

    def citable(self) -> dict[str, Record]:
        """Return the works that may be cited, by citation key."""
        return {key: self.records[identity] for key, identity in self.cited.items()}

    def bodies(self) -> dict[str, str]:
        """Return the text of every section that is written."""
        return {name: section.body for name, section in self.sections.items()}

    def save(self, file: Path) -> None:
        """Write the state whole, so that a kill at any moment leaves the one before or this one."""
        write_json(file, {"schema": SCHEMA, **asdict(self)})


def load_draft(file: Path) -> Draft:
    """Read a state back; a new one where there is no file.

    Raises:
        ConfigError: the file is not one that `Draft.save` wrote.
    """
    if not file.is_file():
        return Draft()
    try:
        plain: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if plain.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        draft = TypeAdapter(Draft).validate_python(plain)
        draft.citable()
        return draft
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{file}: not the state of a draft ({reason}); remove it to resume from the last version"
        ) from None


def read_record(plain: Mapping[str, Any]) -> Record:
    """Return a record from its JSON values."""
    return TypeAdapter(Record).validate_python(plain)
