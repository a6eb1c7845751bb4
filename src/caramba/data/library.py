"""Tokenizers that the `tokenizers` library runs: every tokenizer.json, and byte-level BPEs trained here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from caramba.data.pretoken_cache import PretokenCache, piece_pattern
from caramba.data.token_lengths import measure_token_bytes
from caramba.data.tokenizer import EOS, Tokenizer, refuse_unknown
from caramba.errors import DataError
from caramba.runs.files import write_json

MAX_BPE_SIZE = 1_000_000  # four times the largest vocabularies in use


class LibraryTokenizer(Tokenizer):
    """A tokenizer as the `tokenizers` library stores it in tokenizer.json; the library is imported at first use.

    Text that spells a special token is text, here as in the model's training data.
    """

    def __init__(
        self,
        name: str,
        definition: str,
        vocab_size: int,
        eos_id: int,
        *,
        bos_id: int | None = None,
        adds_bos: bool = False,
    ) -> None:
        super().__init__(name, definition, vocab_size, eos_id)
        self.bos_id = bos_id
        self.adds_bos = adds_bos

    @cached_property
    def _backend(self) -> Any:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(self.definition)
        # Text that spells an end mark is text: as the special token it would lose its bytes.
        backend.encode_special_tokens = True
        # A tokenizer.json may carry its model's padding and length limit; documents are whole.
        backend.no_padding()
        backend.no_truncation()
        return backend

    @cached_property
    def _pieces(self) -> PretokenCache | None:
        pattern = piece_pattern(json.loads(self.definition))
        return None if pattern is None else PretokenCache(pattern, self.encode)

    @cached_property
    def _lengths(self) -> tuple[np.ndarray | None, str | None]:
        return measure_token_bytes(self._backend, self.vocab_size)

    @property
    def token_bytes(self) -> np.ndarray | None:
        return self._lengths[0]

    @property
    def no_bytes_reason(self) -> str | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Why `token_bytes` is None; None when it is not."""
        return self._lengths[1]

    def encode(self, text: str) -> list[int]:
        # Unlike encode, encode_batch lets other threads run, such as a server's event loop.
        return self._backend.encode_batch([text], add_special_tokens=False)[0].ids

    def encode_documents(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self._pieces is not None:
            return [self._pieces.encode(text, self.eos_id) for text in texts]
        found = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.eos_id], dtype=np.int64) for encoding in found]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(token) for token in ids]
        refuse_unknown(kept, self)
        return self._backend.decode(kept, skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def save(self, path: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which has its marks: `load_tokenizer` reads both."""
        super().save(path)
        marks: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        marks["eos_token"] = self._backend.id_to_token(self.eos_id)
        if self.bos_id is not None:
            marks |= {"bos_token": self._backend.id_to_token(self.bos_id), "add_bos_token": self.adds_bos}
        write_json(Path(path).parent / "tokenizer_config.json", marks)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_backend", "_pieces"):  # rebuilt from the definition in the process that uses them
            state.pop(name, None)
        return state


def train_bpe(texts: Iterable[str], vocab_size: int) -> LibraryTokenizer:
    """Train a byte-level BPE (no prefix space, `<eos>` as id 0, all 256 bytes in its alphabet) on `texts`.

    Little text can yield fewer entries than asked for; `vocab_size` of the result is what it has.

    Raises:
        DataError: `vocab_size` cannot hold the 256 bytes and the end mark, or is above `MAX_BPE_SIZE`.

    Reference: Sennrich, Haddow, Birch 2016, arXiv 1508.07909; bytes as in GPT-2 (Radford et al. 2019, section 2.2).
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < 257:
        raise DataError(f"vocab_size={vocab_size} cannot hold 256 bytes and {EOS}; use at least 257")
    if vocab_size > MAX_BPE_SIZE:  # the trainer allocates for all entries at once
        raise DataError(f"vocab_size={vocab_size}: a BPE has at most {MAX_BPE_SIZE:,} entries; use fewer")
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
    return LibraryTokenizer(f"bpe-{size}", backend.to_str(), size, 0)  # the trainer puts special tokens first
