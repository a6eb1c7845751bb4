"""Streams of documents that can resume from a recorded position: text files, and data sets through `datasets`."""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from caramba.errors import DataError

MOST_DOCUMENT_CHARACTERS = 1 << 20
_CHUNK_BYTES = 1 << 20
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


class DocumentSource(Protocol):
    """Documents in a fixed order.

    `identity` is JSON that differs when the documents may differ; `total_bytes` is None when it is not known.
    """

    identity: dict[str, Any]
    total_bytes: int | None

    def documents(self, state: Any) -> Iterator[str]:
        """Yield the documents after `state` (None: all of them)."""
        ...

    def state(self) -> Any:
        """Return, as JSON, the place after the last document that was yielded."""
        ...


class TextSource:
    """UTF-8 files, and those of folders whose names end in one of `suffixes`, in sorted order.

    A file is a document; one above 2**20 characters is cut into several, at the last blank line, else line end, else
    anywhere. With `separator` a file holds the documents between its occurrences. A folder's hidden entries are
    left out. Files that are not UTF-8 are skipped and listed in `not_utf8`.

    Args:
        paths: files and folders.
        suffixes: of the files to take from folders, such as `.txt`; a path that is named itself needs none.
        separator: text between documents, such as `<|endoftext|>`.

    Raises:
        DataError: a path does not exist, or there is no file with text.
    """

    def __init__(
        self, paths: Iterable[Path], suffixes: tuple[str, ...], separator: str | None = None
    ) -> None:
        self.files = _list_files([Path(path) for path in paths], suffixes)
        self.separator = separator
        self.total_bytes: int | None = sum(file.stat().st_size for file in self.files)
        self.not_utf8: list[str] = []
        self._done = 0
        facts = [(str(file.absolute()), *_stamp(file)) for file in self.files]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self.identity = {
            "corpus": "text",
            "files": len(self.files),
            "bytes": self.total_bytes,
            "listing": digest,
            "separator": separator,
            "most_document_characters": MOST_DOCUMENT_CHARACTERS,
        }

    def documents(self, state: Any) -> Iterator[str]:
        self._done = 0
        for text in self._all():
            self._done += 1
            if state is None or self._done > state:
                yield text

    def state(self) -> int:
        return self._done

    def _all(self) -> Iterator[str]:
        for file in self.files:
            if not _is_utf8(file):
                self.not_utf8.append(str(file))
                continue
            yield from _cut(_characters(file), self.separator)


class HubSource:
    """A streaming data set of the `datasets` library: a repository at one commit, or local parquet and JSON lines.

    Args:
        stream: an `IterableDataset` of one split.
        identity: what it was opened from.
        field: the column that holds a document's text.

    Raises:
        DataError: a row has no text under `field`.
    """

    total_bytes: int | None = None

    def __init__(self, stream: Any, identity: dict[str, Any], field: str = "text") -> None:
        self._stream = stream
        self._field = field
        self.identity = {**identity, "field": field}

    def documents(self, state: Any) -> Iterator[str]:
        if state is not None:
            self._stream.load_state_dict(state)
        rows = iter(self._stream)
        while True:
            try:
                row = next(rows, None)
            except ValueError as error:  # what Arrow raises of a line or file that is damaged
                said = " ".join(str(error).split())
                raise DataError(f"{self.identity}: cannot be read: {said}") from error
            if row is None:
                return
            text = row.get(self._field)
            if not isinstance(text, str):
                raise DataError(
                    f"{self.identity}: a row has the columns {', '.join(row)} and {type(text).__name__} under"
                    f" {self._field!r}; expected text: name its column with --field"
                )
            if text:
                yield text

    def state(self) -> Any:
        return self._stream.state_dict()


def _list_files(paths: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += _walk(path, suffixes)
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: no such file or folder; expected text files or folders of them")
    kept = [file for file in dict.fromkeys(found) if file.stat().st_size]
    if not kept:
        named = ", ".join(map(str, paths))
        raise DataError(
            f"{named}: no file with text in it; looked for {', '.join(suffixes)} in folders: name others with --suffix"
        )
    return kept


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            if name[0] != "." and name.endswith(suffixes) and Path(folder, name).is_file():
                yield Path(folder, name)


def _stamp(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_size, facts.st_mtime_ns


def _is_utf8(file: Path) -> bool:
    try:
        for _ in _characters(file):
            pass
    except UnicodeDecodeError:
        return False
    return True


def _characters(file: Path) -> Iterator[str]:
    """Yield the text in pieces of about a megabyte; line ends stay as they are, so byte counts are the file's."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open(file, "rb") as content:
        while True:
            block = content.read(_CHUNK_BYTES)
            yield decoder.decode(block, final=not block)
            if not block:
                return


def _cut(pieces: Iterable[str], separator: str | None) -> Iterator[str]:
    """Cut a file's text into documents, none empty and none above MOST_DOCUMENT_CHARACTERS."""
    rest = ""
    for piece in pieces:
        rest += piece
        if separator:
            *whole, rest = rest.split(separator)
            for document in whole:
                yield from _bounded(document)
        # What cannot become part of a separator that is still coming is cut once it is too long.
        while len(rest) > MOST_DOCUMENT_CHARACTERS + len(separator or ""):
            place = _place_to_cut(rest)
            yield rest[:place]
            rest = rest[place:]
    yield from _bounded(rest)


def _bounded(text: str) -> Iterator[str]:
    while len(text) > MOST_DOCUMENT_CHARACTERS:
        place = _place_to_cut(text)
        yield text[:place]
        text = text[place:]
    if text:
        yield text


def _place_to_cut(text: str) -> int:
    for mark in ("\n\n", "\n"):
        place = text.rfind(mark, MOST_DOCUMENT_CHARACTERS // 2, MOST_DOCUMENT_CHARACTERS)
        if place >= 0:
            return place + len(mark)
    return MOST_DOCUMENT_CHARACTERS
