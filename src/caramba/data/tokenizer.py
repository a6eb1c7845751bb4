"""Tokenizers that know how many bytes of text each token encodes, so that bits per byte is exact."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from caramba.errors import DataError
from caramba.runs.files import write_whole

EOS = "<eos>"
_BYTE_DEFINITION = json.dumps({"type": "byte", "vocab_size": 257, "eos_id": 256})


class Tokenizer(ABC):
    """Text to token ids and back; `<eos>` separates documents and encodes no byte of text.

    Attributes:
        name: what reports print, such as `bpe-2048` or `byte`.
        definition: the text that defines it completely, which `save` writes and `hash` is taken of.
        vocab_size: V, the number of entries; ids are below it.
        eos_id: the id of the end mark.
        bos_id: the id of the start mark; None when there is none. No method here adds it.
        adds_bos: whether the model that it belongs to wants `bos_id` first.
        no_bytes_reason: why `token_bytes` is None; None when it is not.
    """

    bos_id: int | None = None
    adds_bos: bool = False
    no_bytes_reason: str | None = None

    def __init__(self, name: str, definition: str, vocab_size: int, eos_id: int) -> None:
        self.name = name
        self.definition = definition
        self.vocab_size = vocab_size
        self.eos_id = eos_id

    @cached_property
    def hash(self) -> str:
        """Hexadecimal SHA-256 of definition and end mark: equal hashes mean equal ids for equal text."""
        return hashlib.sha256(f"{self.definition}\n{self.eos_id}".encode()).hexdigest()

    @property
    @abstractmethod
    def token_bytes(self) -> np.ndarray | None:
        """UTF-8 bytes that each token encodes, int32 of shape [V], 0 for `<eos>`; None when it has no answer."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end mark; a literal `<eos>` in it is ordinary text."""

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one int64 array of ids per text, an end mark after each; `tokenizers` spreads it over threads."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; end marks vanish, bytes that are not UTF-8 become U+FFFD."""

    def token_id(self, token: str) -> int | None:
        """Return the id of an entry by its own name, such as `<|endoftext|>`; None when there is none."""
        return self.eos_id if token == EOS else None

    def save(self, path: Path) -> None:
        """Write the definition, whole; `load_tokenizer` reads it back with the same hash."""
        write_whole(Path(path), self.definition)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name}, vocab_size={self.vocab_size}, hash={self.hash[:8]})"


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte (ids 0 to 255), and 256 for the end mark."""

    def __init__(self) -> None:
        super().__init__("byte", _BYTE_DEFINITION, 257, 256)

    @property
    def token_bytes(self) -> np.ndarray:
        lengths = np.ones(257, dtype=np.int32)
        lengths[self.eos_id] = 0
        return lengths

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        end = bytes([0])  # a place holder: 256 does not fit a byte
        encoded = [np.frombuffer(text.encode() + end, dtype=np.uint8).astype(np.int64) for text in texts]
        for ids in encoded:
            ids[-1] = self.eos_id
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(token) for token in ids if token != self.eos_id]
        refuse_unknown(kept, self)
        return bytes(kept).decode(errors="replace")


def count_bytes(tokens: Any, token_bytes: np.ndarray) -> int:
    """Count the UTF-8 bytes of text that `tokens` (any shape; array, memory map or CPU tensor) stand for.

    sum over t of token_bytes[tokens[t]], in pieces, so that a memory map is never whole in memory.

    Raises:
        DataError: an id is negative or not below `len(token_bytes)`.
    """
    flat = np.asarray(tokens).reshape(-1)
    total = 0
    for start in range(0, flat.size, 1 << 20):
        piece = flat[start : start + (1 << 20)]
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high >= len(token_bytes):
            wrong = low if low < 0 else high
            raise DataError(
                f"token id {wrong} has no byte count: the vocabulary has {len(token_bytes)} entries"
            )
        total += int(token_bytes[piece].sum(dtype=np.int64))
    return total


def refuse_unknown(ids: list[int], tokenizer: Tokenizer) -> None:
    """Raise when an id is not one of `tokenizer`."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(
                f"token id {token} is not of {tokenizer.name}: ids are 0 to {tokenizer.vocab_size - 1}"
            )
