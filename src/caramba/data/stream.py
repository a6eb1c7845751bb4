"""Several token arrays read as one, without joining them in memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from caramba.errors import DataError


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
                raise IndexError(
                    f"a token stream has no slices of step {step}; take numpy.asarray of it first"
                )
            pieces = self._pieces(start, stop)
            return pieces[0] if len(pieces) == 1 else np.concatenate([self.parts[0][:0], *pieces])
        index = int(key)
        if not -self.size <= index < self.size:
            raise IndexError(f"token {index} of {self.size}")
        index %= self.size
        return self[index : index + 1][0]

    def part(self, start: int, stop: int) -> TokenStream:
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
