"""The folder of a paper: its head, the versions behind it, the draft at work, and the transcript."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caramba.errors import ConfigError
from caramba.runs.files import sha256_of, write_json, write_whole

PAPER, PDF, BIBLIOGRAPHY, RESULTS = "paper.tex", "paper.pdf", "references.bib", "results.tex"
VERSIONS, VERSION, DRAFT, TRANSCRIPT = "versions", "version.json", "draft.json", "transcript.jsonl"
PUBLISHED = "published"  # beside a version whose files have all become the head
_OURS = frozenset({PAPER, VERSIONS, DRAFT, TRANSCRIPT, ".lock"})


class PaperFolder:
    """`RUN/paper/` or another. Files are written whole, and a version appears with all of its files or not at all."""

    def __init__(self, root: Path) -> None:
        """Take a folder that does not exist, is empty, or holds a paper.

        Raises:
            ConfigError: it holds something else.
        """
        self.root = root.absolute()
        if self.root.exists() and not self.root.is_dir():
            raise ConfigError(f"{root}: a file; name a folder for the paper with --output-dir")
        names = {item.name for item in self.root.iterdir()} if self.root.is_dir() else set[str]()
        if names and not names & _OURS:
            raise ConfigError(f"{root}: holds files that are no paper's; name a new folder with --output-dir")

    @property
    def draft_file(self) -> Path:
        return self.root / DRAFT

    def confined(self, path: str) -> Path:
        """Return a path below the folder.

        Raises:
            ConfigError: it leads outside: by .., from the root, or through a link.
        """
        target = (self.root / path).resolve()
        if Path(path).is_absolute() or not target.is_relative_to(self.root.resolve()) or "\0" in path:
            raise ConfigError(f"{path!r} leads out of the paper's folder; name a file in it, such as {PAPER}")
        return target

    def versions(self) -> list[int]:
        """Return the numbers of the versions on disk, oldest first."""
        folder = self.root / VERSIONS
        found = folder.iterdir() if folder.is_dir() else ()
        return sorted(
            int(item.name) for item in found if item.name.isdecimal() and (item / VERSION).is_file()
        )

    def version_path(self, number: int) -> Path:
        return self.root / VERSIONS / f"{number:03d}"

    def head(self) -> dict[str, Any] | None:
        """Return what version.json says of the newest version."""
        numbers = self.versions()
        if not numbers:
            return None
        file = self.version_path(numbers[-1]) / VERSION
        try:
            return json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file}: cannot be read ({error}); it was changed, remove its folder"
            ) from None

    def heal(self) -> None:
        """Put the newest version in place where a kill came before that, or where there is no paper.tex any more."""
        head = self.head()
        if head is None:
            return
        is_published = (self.version_path(head["version"]) / PUBLISHED).is_file()
        if not is_published or not (self.root / PAPER).is_file():
            self._publish(head)

    def edited(self) -> str | None:
        """Return paper.tex where a person has changed it since the newest version, else None."""
        head, paper = self.head(), self.root / PAPER
        if head is None or not paper.is_file() or sha256_of(paper) == head["files"][PAPER]:
            return None
        try:
            return paper.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{paper}: not UTF-8 ({error}); save it as UTF-8") from None

    def adopt(self, files: Mapping[str, bytes], facts: Mapping[str, Any], keep: int | None) -> int:
        """Keep files as the next version, unless they are the newest, and make them the head; `keep` versions stay."""
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        head = self.head()
        if (
            head is not None and head["files"] == digests
        ):  # also after a kill between this and the draft's own record
            self._publish(head)
            return head["version"]
        number = max(self.versions(), default=0) + 1
        final = self.version_path(number)
        final.parent.mkdir(parents=True, exist_ok=True)
        self.confined(VERSIONS)
        staged = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=final.parent))
        try:
            for name, content in files.items():
                write_whole(staged / name, content)
            record = {"version": number, "time": round(time.time(), 3), **facts, "files": digests}
            write_json(staged / VERSION, record)
            os.chmod(staged, 0o755)
            os.rename(staged, final)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        self._publish(record)
        for old in self.versions()[: -keep if keep else 0]:
            shutil.rmtree(self.version_path(old))
        return number

    def note(self, event: str, **fields: Any) -> None:
        """Append one line to the transcript."""
        record = {"time": round(time.time(), 3), "event": event, **fields}
        line = json.dumps(record, ensure_ascii=False, default=str) + "\n"
        with open(self.confined(TRANSCRIPT), "a+b") as file:
            if file.tell() and not self._ends_whole():
                line = "\n" + line  # a killed writer left half a line
            file.write(line.encode())
            file.flush()

    def _ends_whole(self) -> bool:
        with open(self.root / TRANSCRIPT, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _publish(self, record: Mapping[str, Any]) -> None:
        """Copy a version to the head, paper.tex last: until all is there, `heal` begins anew."""
        source = self.version_path(record["version"])
        for name in sorted(record["files"], key=lambda name: name == PAPER):
            write_whole(self.confined(name), (source / name).read_bytes())
        write_whole(source / PUBLISHED, "")
