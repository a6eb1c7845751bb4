"""Token files: .npy, and the shards and document indexes of a folder, written as a stream that can resume."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from tokenize import TokenError
from types import TracebackType
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from caramba.errors import DataError
from caramba.runs.files import sha256_of

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
            raise DataError(
                f"{path}: expected at least {keep} ids in this unfinished file; delete its folder"
            )
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

    def __enter__(self) -> NpyWriter:
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
            readers = {
                (1, 0): npy_format.read_array_header_1_0,
                (2, 0): npy_format.read_array_header_2_0,
            }
            if version not in readers:
                raise ValueError(f".npy version {version} holds no plain integers")
            shape, _, dtype = readers[version](file)
        except (ValueError, EOFError, TypeError, SyntaxError, TokenError, RecursionError) as error:
            raise DataError(
                f"{path}: {size} bytes that are not a .npy array ({str(error)[:100]}); expected what numpy.save writes"
            ) from error
        return shape, dtype, file.tell()


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

    def __enter__(self) -> SplitWriter:
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
