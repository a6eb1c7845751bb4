"""One-dimensional .npy files of token ids: written as a stream, memory-mapped when read, checked before use."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from tokenize import TokenError
from types import TracebackType

import numpy as np
from numpy.lib import format as npy_format

from caramba.errors import DataError

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
