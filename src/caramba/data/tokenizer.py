"""Tokenizers that know how many bytes of text each token stands for, so that bits per byte is exact."""

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
    """Text to token ids and back; `<eos>` stands between documents and for no byte of text.

    Attributes:
        name: what reports print, such as `bpe-2048` or `byte`.
        definition: the text that defines it completely, which `save` writes and `hash` is taken of.
        vocab_size: V, the number of entries; ids are below it.
        eos_id: the id of the end mark.
    """

    def __init__(self, name: str, definition: str, vocab_size: int, eos_id: int) -> None:
        self.name = name
        self.definition = definition
        self.vocab_size = vocab_size
        self.eos_id = eos_id

    @cached_property
    def hash(self) -> str:
        """Hexadecimal SHA-256 of the definition: equal hashes mean equal ids for equal text."""
        return hashlib.sha256(self.definition.encode()).hexdigest()

    @property
    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token stands for, int32 of shape [V]; 0 for `<eos>`."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without an end mark; a literal `<eos>` in it is ordinary text."""

    @abstractmethod
    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return one int64 array of ids per text, an end mark after each; `tokenizers` spreads it over threads."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; end marks vanish, bytes that are not UTF-8 become U+FFFD."""

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
        _refuse_unknown(kept, self)
        return bytes(kept).decode(errors="replace")


class BPETokenizer(Tokenizer):
    """A byte-level BPE as the `tokenizers` library stores it; the library is imported at first use."""

    def __init__(self, name: str, definition: str, vocab_size: int, eos_id: int) -> None:
        super().__init__(name, definition, vocab_size, eos_id)

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.definition)
        # Text that spells an end mark is text: as the special token it would lose its five bytes.
        backend.encode_special_tokens = True
        return backend

    @cached_property
    def token_bytes(self) -> np.ndarray:
        return _byte_level_lengths(self._backend, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.eos_id], dtype=np.int64) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(token) for token in ids]
        _refuse_unknown(kept, self)
        return self._backend.decode(kept, skip_special_tokens=True)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_backend", None)  # rebuilt from the definition in the process that uses it
        return state


def train_bpe(texts: Iterable[str], vocab_size: int) -> BPETokenizer:
    """Train a byte-level BPE (no prefix space, `<eos>` as id 0, all 256 bytes in its alphabet) on `texts`.

    Little text can yield fewer entries than asked for; `vocab_size` of the result is what it has.

    Raises:
        DataError: `vocab_size` cannot hold the 256 bytes and the end mark.

    Reference: Sennrich, Haddow, Birch 2016, arXiv 1508.07909; bytes as in GPT-2 (Radford et al. 2019, section 2.2).
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise DataError(f"data.vocab_size={vocab_size} cannot hold 256 bytes and {EOS}; use at least 257")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    size = backend.get_vocab_size()
    return BPETokenizer(f"bpe-{size}", backend.to_str(), size, 0)  # the trainer puts special tokens first


def load_tokenizer(path: Path, *, name: str | None = None) -> Tokenizer:
    """Read a tokenizer that `Tokenizer.save` or the `tokenizers` library wrote (it needs an `<eos>` token).

    Raises:
        DataError: the file is missing, is not a tokenizer, or has no `<eos>`.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no tokenizer file; expected the tokenizer.json of a token folder")
    definition = path.read_text(encoding="utf-8")
    try:
        kind = json.loads(definition).get("type")
        if kind == "byte":
            return ByteTokenizer()
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(definition)
    except Exception as error:  # the library raises bare Exception for a definition that it cannot read
        raise DataError(
            f"{path}: {len(definition)} characters that are not a tokenizer definition ({error})"
        ) from error
    eos = backend.token_to_id(EOS)
    if eos is None:
        raise DataError(
            f"{path}: the tokenizer has no {EOS} token, which ends documents; add it and save again"
        )
    return BPETokenizer(
        name or f"bpe-{backend.get_vocab_size()}", definition, backend.get_vocab_size(), int(eos)
    )


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


def _refuse_unknown(ids: list[int], tokenizer: Tokenizer) -> None:
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(
                f"token id {token} is not of {tokenizer.name}: ids are 0 to {tokenizer.vocab_size - 1}"
            )


def _byte_level_lengths(backend: Any, vocab_size: int) -> np.ndarray:
    """In the byte-level alphabet one character stands for one byte, so a token's length is its byte count."""
    from tokenizers import pre_tokenizers

    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    lengths = np.zeros(vocab_size, dtype=np.int32)
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if token in special:
            continue
        if not alphabet.issuperset(token):
            raise DataError(
                f"tokenizer entry {index} ({token!r}) is not byte-level, so its bytes cannot be counted;"
                " use a byte-level BPE or data.tokenizer=byte"
            )
        lengths[index] = len(token)
    return lengths
