"""Token folders: shards, document index, tokenizer.json, token_bytes.npy and meta.json; shards read as one stream."""

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from caramba.config.source import read_object
from caramba.data.tokenizer import MAX_VOCABULARY, ByteTokenizer, LibraryTokenizer, Tokenizer, read_definition
from caramba.errors import DataError, quote
from caramba.runs.files import (
    RECORD,
    check_folder,
    has_record,
    part_of,
    record_files,
    sha256_of,
    whole_file,
    write_json,
)


class TokenStream:
    """A 1-D sequence of ids over consecutive parts, each memory-mapped; only what is sliced is read.

    A slice is an array: a view if one part holds it, a copy of just the slice when it crosses parts. `part`
    gives a shorter stream without reading. `tokens[i]` reads one id.

    Args:
        parts: 1-D arrays of one dtype, in order.

    Raises:
        DataError: no parts, a part that is not 1-D, or dtypes that differ.
    """

    ndim = 1

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        kinds = {(part.ndim, part.dtype) for part in parts}
        if len(kinds) != 1 or parts[0].ndim != 1:
            raise DataError(
                f"a token stream over {len(parts)} parts of (dimensions, dtype) {sorted(map(str, kinds))}; expected"
                " one or more 1-D parts of one dtype"
            )
        self.parts = tuple(parts)
        self.dtype = parts[0].dtype
        self._ends = np.cumsum([part.size for part in parts])

    @property
    def size(self) -> int:
        return int(self._ends[-1])

    @property
    def shape(self) -> tuple[int]:
        return (self.size,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(self.size)
            if step != 1:
                raise IndexError(f"a token stream has no slices of step {step}; take numpy.asarray of it first")
            pieces = self._pieces(start, stop)
            return pieces[0] if len(pieces) == 1 else np.concatenate([self.parts[0][:0], *pieces])
        index = int(key)
        if not -self.size <= index < self.size:
            raise IndexError(f"token {index} of {self.size}")
        index %= self.size
        return self[index : index + 1][0]

    def part(self, start: int, stop: int) -> "TokenStream":
        """Return the stream of tokens `start` to `stop` (not negative), unread."""
        return TokenStream(self._pieces(start, stop) or [self.parts[0][:0]])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        joined = self[:]
        return joined.astype(dtype) if dtype is not None else joined

    def places(self) -> list[tuple[str, int, int]] | None:
        """Return (file, byte offset, tokens) of every part; None unless all are memory-mapped."""
        found = [(memmap_place(part), part.size) for part in self.parts]
        kept = [(*place, size) for place, size in found if place is not None]
        return kept if len(kept) == len(found) else None

    def _pieces(self, start: int, stop: int) -> list[np.ndarray]:
        if stop <= start:
            return []
        first = int(np.searchsorted(self._ends, start, side="right"))
        last = int(np.searchsorted(self._ends, stop, side="left"))
        pieces = []
        for index in range(first, last + 1):
            begin = int(self._ends[index - 1]) if index else 0
            pieces.append(self.parts[index][max(0, start - begin) : stop - begin])
        return pieces


Tokens = np.ndarray | TokenStream


def split_at(tokens: Tokens, place: int) -> tuple[Tokens, Tokens]:
    """Return the tokens before `place` and those from it on, without reading them."""
    if isinstance(tokens, TokenStream):
        return tokens.part(0, place), tokens.part(place, tokens.size)
    return tokens[:place], tokens[place:]


def memmap_place(array: np.ndarray) -> tuple[str, int] | None:
    """Return (file, byte offset) of a contiguous memory-mapped array or slice of one; None for any other array.

    `numpy.memmap.offset` of a slice is its parent's, so the place is computed from addresses.
    """
    mapped = getattr(array, "_mmap", None)
    if not isinstance(array, np.memmap) or mapped is None or array.filename is None:
        return None
    if not array.flags.c_contiguous:
        return None
    start = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
    map_offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return os.fspath(array.filename), map_offset + array.ctypes.data - start


SCHEMA = 2
Progress = Callable[[str], None]
_BATCH_CHARACTERS = 1_000_000

_HEADER_BYTES = 128
_MAX_HEADER_BYTES = 4096


def token_dtype(vocab_size: int) -> np.dtype:
    """Return uint16 when V < 65536, else uint32: the least that holds every id."""
    return np.dtype(np.uint16 if vocab_size < 65536 else np.uint32)


class NpyWriter:
    """Writes a 1-D .npy whose length is known only at the end; a context manager.

    The header has a fixed length and is written twice: first as a placeholder, at the end with the shape.

    Args:
        path: the file; created or overwritten, unless `keep` is given.
        dtype: of the ids.
        keep: append to the existing file after its first `keep` ids; the rest is cut off.
    """

    def __init__(self, path: Path, dtype: np.dtype, keep: int | None = None) -> None:
        self.dtype = dtype.newbyteorder("<")
        self.count = keep or 0
        self._file = open(path, "wb" if keep is None else "rb+")  # noqa: SIM115 - closed by __exit__
        if keep is None:
            self._write_header()
            return
        end = _HEADER_BYTES + keep * dtype.itemsize
        if os.fstat(self._file.fileno()).st_size < end:
            self._file.close()
            raise DataError(f"{path}: expected at least {keep} ids in this unfinished file; delete its folder")
        self._file.truncate(end)
        self._file.seek(end)

    def append(self, ids: np.ndarray) -> None:
        """Add `ids`, which must fit the dtype."""
        self._file.write(np.ascontiguousarray(ids, dtype=self.dtype).data)
        self.count += ids.size

    def sync(self) -> None:
        """Bring what was appended to the disk, so that it survives a loss of power."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _write_header(self) -> None:
        text = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.count},), }}"
        length = _HEADER_BYTES - 10
        self._file.seek(0)
        self._file.write(npy_format.MAGIC_PREFIX + bytes([1, 0]) + length.to_bytes(2, "little"))
        self._file.write(text.ljust(length - 1).encode("ascii") + b"\n")

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write_header()
        finally:
            self._file.close()


def open_npy(path: Path) -> np.memmap:
    """Memory-map a .npy of token ids, read-only, as it is.

    Raises:
        DataError: missing, not a .npy, not 1-D, not of integers, empty, or shorter than its header states.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such token file; check data.path")
    size = path.stat().st_size
    shape, dtype, offset = _read_header(path, size)
    if dtype.hasobject or dtype.kind not in "iu":
        raise DataError(
            f"{path}: dtype {dtype}, expected integers such as uint16;"
            " token ids are whole numbers: save them with numpy.save(path, tokens.astype(numpy.uint32))"
        )
    if len(shape) != 1:
        raise DataError(f"{path}: shape {shape}, expected one dimension; save tokens.reshape(-1)")
    if shape[0] <= 0:
        raise DataError(f"{path}: the file holds 0 tokens; expected at least one window of tokens")
    expected = offset + shape[0] * dtype.itemsize
    if size < expected:
        raise DataError(
            f"{path}: the file is truncated: its header states {shape[0]} tokens of {dtype} ({expected} bytes),"
            f" found {size} bytes; copy or prepare it again"
        )
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape)


def _read_header(path: Path, size: int) -> tuple[tuple[int, ...], np.dtype, int]:
    with open(path, "rb") as file:
        try:
            version = npy_format.read_magic(file)
            width = 2 if version == (1, 0) else 4
            length = int.from_bytes(file.read(width), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes, expected at most {_MAX_HEADER_BYTES}")
            file.seek(-width, os.SEEK_CUR)
            readers = {(1, 0): npy_format.read_array_header_1_0, (2, 0): npy_format.read_array_header_2_0}
            if version not in readers:
                raise ValueError(f".npy version {version} holds no plain integers")
            shape, _, dtype = readers[version](file)
        except (ValueError, EOFError, TypeError, SyntaxError, TokenError, RecursionError) as error:
            raise DataError(
                f"{path}: {size} bytes that are not a .npy array ({str(error)[:100]}); expected what numpy.save writes"
            ) from error
        return shape, dtype, file.tell()


SPLITS = ("train", "val")
SHARD_TOKENS = 100_000_000
_INDEX = np.dtype(np.int64)


def shard_name(split: str, number: int) -> str:
    """Return the file name of a shard, such as `train-00000.npy`."""
    return f"{split}-{number:05d}.npy"


def index_name(split: str) -> str:
    """Return the file name of a document index: the first token of each document, int64, from 0."""
    return f"{split}-documents.npy"


class SplitWriter:
    """One split: `train-00000.npy`, `train-00001.npy`, ... and `train-documents.npy`.

    A shard ends with the first document that brings it to `shard_tokens`, so no document spans two shards.

    Args:
        folder: where the files are made; nobody else reads it until it is renamed.
        split: `train` or `val`.
        dtype: of the ids.
        shard_tokens: least tokens of every shard but the last.
        state: what `state()` returned, to resume from there.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: np.dtype,
        shard_tokens: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        state = state or {}
        self.shards: list[dict[str, Any]] = list(state.get("shards", []))
        self.documents: int = state.get("documents", 0)
        self.bytes: int = state.get("bytes", 0)
        self.max_id: int = state.get("max_id", 0)
        self._before = sum(shard["tokens"] for shard in self.shards)
        keep = state.get("open_tokens")
        self._out = None if keep is None else NpyWriter(self._path(), dtype, keep)
        self._index = NpyWriter(folder / index_name(split), _INDEX, self.documents or None)

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return self._before + (self._out.count if self._out else 0)

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        """Append one document, which ends with its end mark and encodes `text_bytes` bytes of text."""
        if self._out is None:
            self._out = NpyWriter(self._path(), self.dtype)
        self._index.append(np.array([self.tokens], dtype=_INDEX))
        self._out.append(ids)
        self.documents += 1
        self.bytes += text_bytes
        self.max_id = max(self.max_id, int(ids.max()))
        if self._out.count >= self.shard_tokens:
            self._close_shard()

    def state(self) -> dict[str, Any]:
        """Bring everything to the disk and return what is needed to resume from here, as JSON."""
        self._index.sync()
        if self._out:
            self._out.sync()
        return {
            "shards": self.shards,
            "documents": self.documents,
            "bytes": self.bytes,
            "max_id": self.max_id,
            "open_tokens": self._out.count if self._out else None,
        }

    def finish(self) -> dict[str, Any] | None:
        """Close the last shard and the index and return the split's facts; None when it has no documents."""
        if self._out:
            self._close_shard()
        self._index.__exit__(None, None, None)
        if self.documents == 0:
            (self.folder / index_name(self.split)).unlink()
            return None
        return {
            "tokens": self._before,
            "bytes": self.bytes,
            "documents": self.documents,
            "max_id": self.max_id,
            "shards": self.shards,
            "index_sha256": sha256_of(self.folder / index_name(self.split)),
        }

    def __enter__(self) -> "SplitWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # On failure only the handles are closed: headers stay placeholders until the writer resumes.
        failed = kind or DataError
        if self._out:
            self._out.__exit__(failed, error, trace)
        self._index.__exit__(failed, error, trace)

    def _path(self) -> Path:
        return self.folder / shard_name(self.split, len(self.shards))

    def _close_shard(self) -> None:
        assert self._out is not None
        self._out.sync()
        self._out.__exit__(None, None, None)
        path, count = self._path(), self._out.count
        self._out = None
        self.shards.append({"file": path.name, "tokens": count, "sha256": sha256_of(path)})
        self._before += count


@dataclass(frozen=True)
class TokenFolder:
    """An open token folder: the facts of meta.json, and its arrays, memory-mapped."""

    path: Path
    meta: dict[str, Any]
    train: Tokens
    val: Tokens | None
    tokenizer: Tokenizer

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes per token, int32 [V], from token_bytes.npy; None when the tokenizer cannot tell."""
        if self.meta["tokenizer"].get("no_bytes_reason") is not None:
            return None
        lengths = np.asarray(open_npy(self.path / "token_bytes.npy"))
        if lengths.size != self.meta["tokenizer"]["vocab_size"]:
            raise DataError(
                f"{self.path / 'token_bytes.npy'}: {lengths.size} entries, but meta.json has "
                f"{self.meta['tokenizer']['vocab_size']}; prepare the folder again"
            )
        return lengths

    @property
    def has_documents(self) -> bool:
        """Whether the document index of every split is there."""
        return all((self.path / index_name(split)).is_file() for split in self.meta["splits"])

    def documents(self, split: str) -> np.ndarray:
        """First token of each document of `train` or `val`, int64, memory-mapped; it ends where the next begins.

        Raises:
            DataError: the index is missing, damaged, or its document count differs from meta.json.
        """
        path = self.path / index_name(split)
        if not path.is_file():
            raise DataError(
                f"{path}: missing; it locates the documents. Prepare the folder again, or read them as one stream "
                "(data.packing=concat without data.document_mask)"
            )
        index = open_npy(path)
        expected = self.meta["splits"].get(split, {}).get("documents")
        if index.size != expected:
            raise DataError(
                f"{path}: {index.size} documents, but meta.json has {quote(expected)}; prepare the folder again"
            )
        return index

    @property
    def content(self) -> str:
        """SHA-256 of the tokens of both splits and of what made them, wherever the text was read from."""
        facts = [self.meta["tokenizer"]["hash"], self.meta["dtype"], self.meta["splits"]]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of meta.json's content, which holds the hashes of both splits."""
        # Without the name of the record of sums: a folder that was made before it has the same tokens.
        facts = {key: value for key, value in self.meta.items() if key != "checksums"}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def write_token_folder(
    folder: Path,
    splits: Mapping[str, Iterable[str]],
    tokenizer: Tokenizer,
    source: Mapping[str, Any],
    *,
    progress: Progress | None = None,
) -> None:
    """Encode the documents of `splits` (train, val) and write a token folder at `folder`.

    Everything is made in a temporary folder next to it and renamed, so that an interrupt leaves nothing and of two
    processes that make the same folder at once the first one's stays.

    Args:
        folder: where it shall be; an existing one is left as it is.
        splits: texts of the documents of `train` and of `val`; may be generators.
        tokenizer: ends each document with its end mark.
        source: facts about the corpus, kept in meta.json; must not hold times, since it is fingerprinted.
        progress: called with each step.

    Raises:
        DataError: a split has no documents.
    """
    with part_of(folder) as temporary:
        write_tokenizer(temporary, tokenizer)
        dtype = token_dtype(tokenizer.vocab_size)
        facts: dict[str, Any] = {}
        for split in SPLITS:
            with SplitWriter(temporary, split, dtype, SHARD_TOKENS) as out:
                for batch in document_batches(splits[split]):
                    for ids, text in zip(tokenizer.encode_documents(batch), batch, strict=True):
                        out.add(ids, len(text.encode()))
                    if progress:
                        progress(f"encoding {split}: {out.bytes / 1e6:.1f} MB, {out.tokens:,} tokens")
                facts[split] = out.finish()
            if facts[split] is None:
                raise DataError(f"{folder}: the {split} split has no documents; expected at least one")
        write_meta(temporary, tokenizer, facts, source)
        publish_folder(temporary, folder)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write tokenizer.json and, when bytes per token are known, token_bytes.npy."""
    tokenizer.save(folder / "tokenizer.json")
    lengths = tokenizer.token_bytes
    if lengths is not None:
        with whole_file(folder / "token_bytes.npy") as part, NpyWriter(part, np.dtype(np.int32)) as out:
            out.append(lengths)


def write_meta(folder: Path, tokenizer: Tokenizer, splits: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    """Write meta.json; `splits` are what `SplitWriter.finish` returned, None for a split without documents."""
    meta = {
        "schema": SCHEMA,
        "tokenizer": {
            "name": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "hash": tokenizer.hash,
            "eos_id": tokenizer.eos_id,
            "bos_id": tokenizer.bos_id,
            "adds_bos": tokenizer.adds_bos,
            "no_bytes_reason": tokenizer.no_bytes_reason,
        },
        "dtype": token_dtype(tokenizer.vocab_size).name,
        "splits": {split: facts for split, facts in splits.items() if facts is not None},
        "source": dict(source),
        "checksums": RECORD,
    }
    write_json(folder / "meta.json", meta)
    known = {shard["file"]: shard["sha256"] for facts in meta["splits"].values() for shard in facts["shards"]}
    (folder / RECORD).unlink(missing_ok=True)  # of a preparation that was interrupted at this point
    record_files(folder, sorted(file for file in folder.iterdir() if not file.name.startswith(".")), known)


def publish_folder(temporary: Path, folder: Path) -> None:
    """Rename a finished folder to its place; a finished token folder that is there already stays.

    Raises:
        OSError: another file has this name.
    """
    os.chmod(temporary, 0o755)
    try:
        os.rename(temporary, folder)
    except OSError:
        if not (folder / "meta.json").is_file():  # not another process's finished folder: a real failure
            raise


def document_batches(texts: Iterable[str], most_characters: int = _BATCH_CHARACTERS) -> Iterator[list[str]]:
    """Yield the texts in lists of about `most_characters` characters in all."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= most_characters:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def open_token_folder(folder: Path) -> TokenFolder:
    """Open a token folder without reading its tokens.

    Raises:
        DataError: a file is missing, damaged, differs from its recorded SHA-256, or does not agree with meta.json.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    if "checksums" in meta and not has_record(folder):
        raise DataError(f"{folder / RECORD}: missing, and meta.json names it; prepare the folder again")
    stated = meta["tokenizer"]
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise DataError(f"{tokenizer_path}: missing; a token folder has it next to meta.json. Prepare it again")
    definition = read_definition(tokenizer_path)
    if stated["name"] == "byte":
        tokenizer: Tokenizer = ByteTokenizer()
        tokenizer.definition = definition
    else:
        marks = {"bos_id": stated.get("bos_id"), "adds_bos": bool(stated.get("adds_bos"))}
        tokenizer = LibraryTokenizer(stated["name"], definition, stated["vocab_size"], stated["eos_id"], **marks)
    if tokenizer.hash != stated["hash"]:
        raise DataError(
            f"{tokenizer_path}: hash {tokenizer.hash[:16]}, but the tokens of meta.json were made with"
            f" {stated['hash'][:16]}; the tokenizer was replaced. Prepare the folder again"
        )
    arrays = {split: _open_split(folder, split, meta) for split in SPLITS}
    train = arrays["train"]
    assert train is not None  # _read_meta requires it
    return TokenFolder(folder, meta, train, arrays["val"], tokenizer)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if path.is_file():
        check_folder(folder, DataError)
    else:
        raise DataError(
            f"{folder}: no meta.json in this folder, so it is not a token folder;"
            " expected meta.json, tokenizer.json and train-00000.npy. If it is a cache, delete it"
        )
    try:
        meta = read_object(path, DataError, "prepare the folder again")
        schema = meta["schema"]
        if schema != SCHEMA:
            raise DataError(
                f"{path}: schema {quote(schema)}, expected {SCHEMA}; prepare the folder again with this version"
            )
        marks = [meta["tokenizer"].get(key) for key in ("bos_id", "no_bytes_reason")]
        sizes = [
            *(shard["tokens"] for facts in meta["splits"].values() for shard in facts["shards"]),
            *(facts["max_id"] for facts in meta["splits"].values()),
            meta["splits"]["train"]["tokens"],
            meta["tokenizer"]["vocab_size"],
            meta["tokenizer"]["eos_id"],
        ]
        names = [shard["file"] for facts in meta["splits"].values() for shard in facts["shards"]]
        strings = [meta["tokenizer"]["name"], meta["tokenizer"]["hash"], meta["dtype"], *names]
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: {type(error).__name__}: {str(error)[:100]}; expected what write_token_folder writes"
        ) from error
    if (
        not all(type(size) is int and 0 <= size < 2**62 for size in sizes)
        or not all(isinstance(text, str) for text in strings)
        or not isinstance(marks[0], int | None)
        or not isinstance(marks[1], str | None)
        or not meta["tokenizer"]["eos_id"] < meta["tokenizer"]["vocab_size"] <= MAX_VOCABULARY
        or meta["dtype"] not in ("uint16", "uint32")
        or not all(facts["shards"] for facts in meta["splits"].values())
    ):
        found = f"sizes {str(sizes)[:100]}, texts {str(strings)[:100]} and marks {str(marks)[:100]}"
        raise DataError(f"{path}: {found}; expected integers, texts and the facts of a token folder; prepare it again")
    outside = next((name for name in names if name in ("", ".", "..") or Path(name).name != name), None)
    if outside is not None:
        raise DataError(
            f"{path}: names the shard {outside[:200]!r}, expected a file of the same folder; prepare the folder again"
        )
    return meta


def _open_split(folder: Path, split: str, meta: dict[str, Any]) -> Tokens | None:
    facts = meta["splits"].get(split)
    if facts is None:
        return None
    parts = [_open_shard(folder, shard, meta["dtype"]) for shard in facts["shards"]]
    return parts[0] if len(parts) == 1 else TokenStream(parts)


def _open_shard(folder: Path, shard: dict[str, Any], dtype: str) -> np.memmap:
    tokens = open_npy(folder / shard["file"])
    if tokens.size != shard["tokens"] or tokens.dtype != np.dtype(dtype):
        raise DataError(
            f"{folder / shard['file']}: {tokens.size} tokens of {tokens.dtype}, but meta.json has {shard['tokens']} of"
            f" {dtype}; delete or prepare the folder again"
        )
    return tokens
