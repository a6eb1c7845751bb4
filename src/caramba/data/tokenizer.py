"""Tokenizers that know the bytes of each token, so that bits per byte is exact; BPE by the `tokenizers` library."""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from caramba.errors import DataError
from caramba.runs.files import write_json, write_whole

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
            raise DataError(f"token id {wrong} has no byte count: the vocabulary has {len(token_bytes)} entries")
        total += int(token_bytes[piece].sum(dtype=np.int64))
    return total


def refuse_unknown(ids: list[int], tokenizer: Tokenizer) -> None:
    """Raise when an id is not one of `tokenizer`."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(f"token id {token} is not of {tokenizer.name}: ids are 0 to {tokenizer.vocab_size - 1}")


# Byte-level pre-tokenizers cut text by a pattern; these are the ones in wide use, as tokenizer.json spells them.
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""A pre-tokenizer or decoder of byte-level vocabularies, as tokenizer.json has it."""


def bpe_definition(
    vocab: Mapping[str, int],
    merges: Sequence[Any],
    *,
    added: Sequence[dict[str, Any]],
    pre_tokenizer: dict[str, Any],
    decoder: dict[str, Any] = BYTE_LEVEL,
    normalizer: dict[str, Any] | None = None,
    ignore_merges: bool = False,
) -> dict[str, Any]:
    """Return the content of the tokenizer.json of a byte-level BPE; `added` are of `token_entry`."""
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added)},
        **{"normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "post_processor": None},
        "decoder": decoder,
        "model": {
            **{"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None},
            **{"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False},
            **{"ignore_merges": ignore_merges, "vocab": dict(vocab), "merges": list(merges)},
        },
    }


def split_step(pattern: str) -> dict[str, Any]:
    """Return the step of a pre-tokenizer that cuts text by a pattern."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def token_entry(index: int, text: str, *, special: bool = True) -> dict[str, Any]:
    """Return an entry of a tokenizer.json's added tokens."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **flags, "special": special}


def byte_letters() -> dict[str, int]:
    """Return the printable letter that represents each byte in byte-level vocabularies.

    Reference: Radford et al., 2019 (GPT-2): printable Latin-1 represents itself, the other bytes U+0100 onwards.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_IDS = np.dtype(np.uint32)
_MAX_PRETOKENS = 400_000  # about 100 MB of memory; later pretokens are encoded without being cached

_OTHER = re.compile(r"[^\x00-\x7f]")
# No piece of any of the patterns above holds a space after another character, so one always begins here.
_SAFE = re.compile(r"(?<=[!-~]) ")


class _Memory(dict[str, bytes]):
    """Ids of each piece as raw integers: joining bytes is several times quicker than chaining Python's integers."""

    def __init__(self, encode: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, piece: str) -> bytes:
        ids = np.array(self._encode(piece), dtype=_IDS).tobytes()
        if len(self) < _MAX_PRETOKENS and len(piece) <= 64:
            self[piece] = ids
        return ids


class PretokenCache:
    """Encodes text piece by piece; equal to the library's ids because BPE never merges across pieces.

    `re` cuts ASCII text only: there it and the library agree which characters are letters, numbers and space. Words
    with other characters go to the library, from one space to another.

    Args:
        pattern: from `piece_pattern`.
        encode: the library's own encoding of a text, without special tokens.
    """

    def __init__(self, pattern: re.Pattern[str], encode: Callable[[str], list[int]]) -> None:
        self._find = pattern.findall
        self._memory = _Memory(encode)

    def encode(self, text: str, end: int) -> np.ndarray:
        """Return the ids of `text` and `end` after them, int64."""
        pieces = self._find(text) if text.isascii() else chain.from_iterable(self._mixed(text))
        last = np.array([end], dtype=_IDS).tobytes()
        joined = b"".join(chain(map(self._memory.__getitem__, pieces), (last,)))
        return np.frombuffer(joined, dtype=_IDS).astype(np.int64)

    def _mixed(self, text: str) -> Iterator[list[str]]:
        place = 0
        while (other := _OTHER.search(text, place)) is not None:
            start = _safe_before(text, place, other.start())
            yield self._find(text[place:start])
            found = _SAFE.search(text, other.end())
            place = found.start() if found else len(text)
            yield [text[start:place]]
        yield self._find(text[place:])


def _safe_before(text: str, lowest: int, place: int) -> int:
    """The last place before `place` where a piece begins for certain; `lowest` is one."""
    while (space := text.rfind(" ", lowest, place)) > lowest:
        if "!" <= text[space - 1] <= "~":
            return space
        place = space
    return lowest


def piece_pattern(definition: dict[str, Any]) -> re.Pattern[str] | None:
    """Return the pattern that cuts ASCII text as this tokenizer does; None when it is not one that is known.

    Args:
        definition: a parsed tokenizer.json.
    """
    model = definition.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout") or model.get("unk_token"):
        return None
    if (definition.get("normalizer") or {"type": "NFC"}) != {"type": "NFC"}:  # NFC leaves ASCII as it is
        return None
    if any(not token["special"] for token in definition.get("added_tokens", ())):
        return None
    step = definition.get("pre_tokenizer") or {}
    parts = step.get("pretokenizers", [step]) if step.get("type") == "Sequence" else [step]
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    if len(parts) == 1 and parts[0].get("use_regex", True):
        return _ascii(GPT2)
    if len(parts) == 2 and parts[0].get("type") == "Split" and not parts[1].get("use_regex", True):
        wanted = (parts[0].get("pattern") or {}).get("Regex")
        is_plain = str(parts[0].get("behavior")).lower() == "isolated" and not parts[0].get("invert")
        if is_plain and wanted in (GPT2, CL100K, QWEN):
            return _ascii(wanted)
    return None


def _ascii(pattern: str) -> re.Pattern[str]:
    words, contractions = r" ?\p{L}+|", r"'(?:[sdmt]|ll|ve|re)|"
    if pattern == GPT2:  # no text begins both; words are what most pieces are
        pattern = words + contractions + pattern.replace(words, "").replace(contractions, "")
    text = pattern.replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]").replace(r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]")
    # The library's \s is Unicode white space, which leaves out the four separators 0x1c to 0x1f that re adds.
    text = text.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    return re.compile(text.replace(r"[^\s", r"[^ \t-\r").replace(r"\S", r"[^ \t-\r]").replace(r"\s", r"[ \t-\r]"))


_SPACE = "\u2581"  # SentencePiece writes a space as this character
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# A rule that loses or changes text (lower case, stripped space, an invented first space, unknown words) fails here.
_PROBES = (
    "Hello, World! it's 12,345.\n",
    "  two spaces  and\ttabs\r\n\r\n    end ",
    "def f(x):\n    return x\n",
    "\u00fcnic\u00f6de \u2713 \u6f22\u5b57 \U0001f642 \ufb01 \u2581",
    "word",
)


def measure_token_bytes(backend: Any, vocab_size: int) -> tuple[np.ndarray | None, str | None]:
    """Return (UTF-8 bytes per token, int32 [V]; None) or (None, the reason).

    Byte-level: a character of a token is a byte. SentencePiece style: `\u2581` is a space and `<0xNN>` a byte. Special
    tokens stand for no text, other added tokens for their own. With an NFC normaliser, bytes are those of the
    normalised text.
    """
    definition = json.loads(backend.to_str())
    is_byte_level = '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")) + json.dumps(definition.get("decoder"))
    added = dict(backend.get_added_tokens_decoder())
    letters = set(byte_letters())
    lengths = np.zeros(vocab_size, dtype=np.int32)
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(added[index].content.encode())
        elif is_byte_level:
            if not letters.issuperset(token):
                return None, f"entry {index} ({token!r}) of a byte-level vocabulary is not byte-level"
            lengths[index] = len(token)
        else:
            lengths[index] = 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    for probe in _PROBES:
        # In SentencePiece style a literal U+2581 in text and a space are one token: they cannot be distinguished.
        text = probe if is_byte_level else probe.replace(_SPACE, "")
        found = int(lengths[backend.encode(text, add_special_tokens=False).ids].sum())
        if found != len(text.encode()):
            return None, (
                f"the tokenizer changes text before it encodes it: {text!r} has {len(text.encode())} bytes, its tokens"
                f" stand for {found} (an invented first space, lower case, or unknown words)"
            )
    return lengths, None


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


def first_texts(texts: Iterable[str], characters: int = 8_000_000) -> Iterator[str]:
    """Yield texts until they hold so many characters: training a BPE on the default takes a few seconds."""
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return


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


MAX_VOCABULARY = 1 << 24
_MAX_BYTES = 256 << 20


def read_definition(path: Path) -> str:
    """Return the text of a tokenizer.json or of a file next to it.

    Raises:
        DataError: the file is too large or is not UTF-8.
    """
    size = path.stat().st_size
    if size > _MAX_BYTES:
        raise DataError(f"{path}: {size} bytes, expected at most {_MAX_BYTES}; copy the file again")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason}); copy the file again") from error
