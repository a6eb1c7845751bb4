"""Writes the shards and document indexes of a token folder as a stream that can stop anywhere and resume."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from caramba.data.npy import NpyWriter
from caramba.errors import DataError
from caramba.runs.files import sha256_of

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
