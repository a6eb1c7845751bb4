"""What is on disk of a paper: its head, the versions behind it, and the draft at work."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.paper.budget import Spent
from caramba.paper.literature import Record
from caramba.runs.files import part_of, sha256_of, write_json, write_whole

PAPER, PDF, BIBLIOGRAPHY, RESULTS = "paper.tex", "paper.pdf", "references.bib", "results.tex"
VERSIONS, VERSION, DRAFT = "versions", "version.json", "draft.json"
AGENT, HUMAN = "agent", "human"
PUBLISHED = "published"  # in a version whose files have all become the head
# What a draft that was stopped at once leaves; a folder with nothing else is as good as new.
_BEGINNINGS = frozenset({".lock", "research"})


class PaperFolder:
    """`RUN/paper/` or another. Files are written whole, and a version appears with all of its files or not at all."""

    def __init__(self, root: Path) -> None:
        """Take a folder that does not exist, is empty, or holds a draft or a version of caramba's.

        A paper.tex is no sign of either: it may be a person's own.

        Raises:
            ConfigError: it holds something else, or a paper.tex of which no version is there.
        """
        self.root = root.absolute()
        self.draft_file = self.root / DRAFT
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"{root}: a file; name a folder for the paper with --output-dir")
        names = os.listdir(self.root) if self.root.is_dir() else []
        is_new = all(name in _BEGINNINGS or name.endswith(".part") for name in names)
        is_draft = {"sections", "messages"} <= _record(self.draft_file).keys() and PAPER not in names
        if not is_new and not is_draft and self.head() is None:
            raise ConfigError(
                f"{root}: holds files, and no version of a paper by caramba in {VERSIONS}/, so what is yours is "
                f"unknown; put {VERSIONS}/ back, or name a new folder with --output-dir"
            )

    def _target(self, name: str) -> Path:
        """Return where a file of the folder is written; no link may lead outside."""
        target = (self.root / name).resolve()
        if not target.is_relative_to(self.root.resolve()):
            raise ConfigError(f"{self.root / name}: leads out of the paper's folder; remove the link")
        return target

    def versions(self) -> list[int]:
        """Return the numbers of the versions on disk, oldest first."""
        names = [file.parent.name for file in self.root.glob(f"{VERSIONS}/*/{VERSION}")]
        return sorted(int(name) for name in names if name.isdecimal())

    def version_path(self, number: int) -> Path:
        return self.root / VERSIONS / f"{number:03d}"

    def head(self) -> dict[str, Any] | None:
        """Return the content of the newest version's version.json."""
        if not (numbers := self.versions()):
            return None
        file = self.version_path(numbers[-1]) / VERSION
        head = _record(file)
        if head.get("version") != numbers[-1] or PAPER not in head.get("files", {}):
            raise ConfigError(f"{file}: cannot be read, or is not as caramba wrote it; remove its folder")
        return head

    def heal(self) -> None:
        """Put the newest version in place where a kill came before that, or where there is no paper.tex any more."""
        if head := self.head():
            files = (self.version_path(head["version"]) / PUBLISHED, self.root / PAPER)
            if not all(file.is_file() for file in files):
                self._publish(head)

    def adopt(self, files: Mapping[str, bytes], facts: Mapping[str, Any], keep: int | None) -> int:
        """Keep files as the next version, unless they are the newest, and make them the head; `keep` versions stay."""
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        head = self.head()
        if head is None or head["files"] != digests:  # they are equal also after a kill before the draft's own record
            number = 1 if head is None else head["version"] + 1
            head = {"version": number, "time": round(time.time(), 3), **facts, "files": digests}
            final = self.version_path(number)
            final.parent.mkdir(parents=True, exist_ok=True)
            self._target(VERSIONS)
            with part_of(final) as staged:
                for name, content in files.items():
                    write_whole(staged / name, content)
                write_json(staged / VERSION, head)
                os.chmod(staged, 0o755)
                os.rename(staged, final)
        self._publish(head)
        for old in self.versions()[: -keep if keep else 0]:
            shutil.rmtree(self.version_path(old))
        return head["version"]

    def _publish(self, record: Mapping[str, Any]) -> None:
        """Copy a version to the head, paper.tex last: until all is there, `heal` begins again.

        Files there that are of no version are kept next to it, but for the edited paper.tex that this one is from.
        """
        source = self.version_path(record["version"])
        known = {(PAPER, record.get("taken_sha256", ""))}
        for number in self.versions():
            known |= set(_record(self.version_path(number) / VERSION).get("files", {}).items())
        for name in sorted(record["files"], key=lambda name: name == PAPER):
            target = self._target(name)
            if target.exists() and (target.is_dir() or (name, sha256_of(target)) not in known):
                _set_aside(target)
            write_whole(target, (source / name).read_bytes())
        write_whole(source / PUBLISHED, "")


def _set_aside(target: Path) -> None:
    number = 1
    while os.path.lexists(kept := target.with_name(f"{target.name}.edited-{number}")):
        number += 1
    target.rename(kept)
    logger.warning(f"paper: {target} is not as caramba wrote it; it is kept as {kept.name}")


def _record(file: Path) -> dict[str, Any]:
    """Return a JSON object, an empty one where there is none that can be read."""
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return plain if isinstance(plain, dict) else {}


@dataclass(frozen=True)
class Section:
    """The body of a section and who wrote it last: `agent` or `human`."""

    body: str
    by: str = AGENT


@dataclass
class Draft:
    """A draft at work. `messages` is the conversation so far, and empty once its version is adopted, which keeps it.

    `cited` are ids of records, `taken_sha256` is the hash of the edited paper.tex that was taken over since then.
    """

    sections: dict[str, Section] = field(default_factory=lambda: {})
    records: dict[str, Record] = field(default_factory=lambda: {})
    cited: list[str] = field(default_factory=lambda: [])
    messages: list[dict[str, Any]] = field(default_factory=lambda: [])
    spent: Spent = field(default_factory=Spent)
    run_id: str = ""
    opening_sha256: str = ""
    taken_sha256: str = ""

    def citable(self) -> dict[str, Record]:
        """Return the works that may be cited, by citation key: those that were added, and a person's own."""
        return {work.key: work for work in self.records.values() if work.id in self.cited or work.entry}

    def save(self, file: Path) -> None:
        """Write the state whole, so that a kill at any moment leaves the one before or this one."""
        write_json(file, asdict(self))


def load_draft(folder: PaperFolder) -> Draft:
    """Read the state of a draft, else that of the newest version; a new one where there is neither.

    Raises:
        ConfigError: the file is not one that caramba wrote.
    """
    file = folder.draft_file
    try:
        if not file.is_file() and (head := folder.head()) is not None:
            file = folder.version_path(head["version"]) / VERSION
            return replace(TypeAdapter(Draft).validate_python(head), messages=[])
        return TypeAdapter(Draft).validate_json(file.read_bytes()) if file.is_file() else Draft()
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        fix = "remove it to resume from the last version"
        if file != folder.draft_file:
            fix = "it is of an earlier caramba: name a new folder with --output-dir"
        raise ConfigError(f"{file}: not the state of a draft ({reason}); {fix}") from None
