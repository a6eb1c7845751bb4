"""Texts to tokenise: files, data sets of the hub or local ones, and those of a plugin."""

# pyright: reportMissingImports=false
# The library is an optional extra, and its own annotations are loose.
import codecs
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from caramba.config.extension import DataSourceConfig, build_extension, user_traceback
from caramba.config.plugins import read_source
from caramba.errors import DataError, ExtensionFailedError, one_line
from caramba.runs.deadline import TimedOut, run_with_timeout

MOST_DOCUMENT_CHARACTERS = 1 << 20
_CHUNK_BYTES = 1 << 20
_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})


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

    def __init__(self, paths: Iterable[Path], suffixes: tuple[str, ...], separator: str | None = None) -> None:
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
                said = one_line(error)
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


DocumentSource = TextSource | HubSource
"""Documents in a fixed order: `documents` yields those after a state (None: all), `state` is JSON and the place after
the last one; `identity` is JSON that differs when the documents may, `total_bytes` None when it is not known."""


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


def open_source(config: DataSourceConfig) -> Callable[[str], Iterator[str]]:
    """Return a function that yields the texts of a split, from the beginning at each call.

    Raises:
        ConfigError: the target is not of its kind.
    """
    made = build_extension(config, config)
    return lambda split: _texts(config, made, split)


def source_identity(config: DataSourceConfig) -> dict[str, str]:
    """Return what tells one source from another: its type, its keys, and the SHA-256 of its code."""
    schema = type(config).__module__
    keys = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return {"source": config.type, "keys": keys, "code": read_source(schema).identity}


def _texts(config: DataSourceConfig, made: Any, split: str) -> Iterator[str]:
    where = f"{config.key} ({config.type})"
    n_texts = 0
    try:
        for text in made.texts(split):
            if not isinstance(text, str):
                raise DataError(f"{where}: texts({split!r}) yields {type(text).__name__}, expected text")
            n_texts += 1
            yield text
    except DataError:
        raise
    except Exception as error:
        raise ExtensionFailedError(f"{where}: texts({split!r}) failed: {user_traceback(error)}") from error
    if not n_texts:
        raise DataError(f"{where}: texts({split!r}) yields nothing; expected documents of both splits")


FINEWEB = "HuggingFaceFW/fineweb"
FINEWEB_SAMPLE = "sample-10BT"
_WAIT_SECONDS = 8
_BUILDERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".gz": "json", ".zst": "json"}
_WAYS_ON = (
    "check the network or a proxy; or fetch its parquet files elsewhere, copy them here and give them with --from PATH;"
    " or use `caramba prepare text PATH` or `caramba prepare stdlib`, which need no network"
)


def open_hub(repository: str, config: str | None, revision: str | None, field: str = "text") -> HubSource:
    """Open a hub data set's train split as a stream, pinned to the commit that `revision` is now.

    Raises:
        DataError: `datasets` is not installed, or the hub does not answer in eight seconds or refuses.
    """
    datasets = _datasets()
    commit = _commit(repository, revision)
    try:
        stream = datasets.load_dataset(repository, name=config, split="train", streaming=True, revision=commit)
    except Exception as error:  # every layer below it raises its own kind
        raise DataError(
            f"{repository} at {commit}: cannot be opened ({type(error).__name__}: {error}); {_WAYS_ON}"
        ) from error
    identity = {"corpus": repository, "config": config, "revision": commit}
    return HubSource(stream, identity, field)


def open_local(paths: list[Path], field: str = "text") -> HubSource:
    """Open parquet or JSON-lines files, or folders of them, as a stream; the same code as a hub data set's.

    Raises:
        DataError: `datasets` is not installed, or there are no such files, or they are of two formats.
    """
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    files = [file for file in files if file.suffix in _BUILDERS and file.is_file()]
    builders = {_BUILDERS[file.suffix] for file in files}
    if len(builders) != 1:
        raise DataError(
            f"{', '.join(map(str, paths))}: {len(files)} data files of {sorted(builders) or 'no known format'};"
            " expected .parquet files, or .jsonl files (also .jsonl.gz, .jsonl.zst), not both"
        )
    stream = _datasets().load_dataset(
        builders.pop(), data_files=[str(file) for file in files], split="train", streaming=True
    )
    listing = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    return HubSource(stream, {"corpus": "local data set", "files": listing}, field)


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "caramba prepare fineweb: the `datasets` library is not installed; pip install 'caramba[data]', or use"
            " `caramba prepare text PATH`, which needs nothing more"
        ) from error
    return datasets


def _commit(repository: str, revision: str | None) -> str:
    """Ask the hub for the commit of a revision; in a thread, since a name server may take minutes to say no."""
    from huggingface_hub import HfApi

    cause: Exception | None = None
    said = f"no answer in {_WAIT_SECONDS} s"
    try:
        info = run_with_timeout(
            _WAIT_SECONDS, lambda: HfApi().dataset_info(repository, revision=revision, timeout=_WAIT_SECONDS)
        )
        if info.sha:
            return str(info.sha)
    except Exception as error:
        if not isinstance(error, TimedOut):
            cause, said = error, f"{type(error).__name__}: {error}"
    raise DataError(f"{repository}: the hub cannot be reached ({' '.join(said.split())[:200]}); {_WAYS_ON}") from cause
