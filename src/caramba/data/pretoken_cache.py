"""Fast encoding for known byte-level BPEs: `re` pre-tokenizes, and the ids of each pretoken are cached."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np

# Byte-level pre-tokenizers cut text by a pattern; these are the ones in wide use, as tokenizer.json spells them.
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = CL100K.replace(r"\p{N}{1,3}", r"\p{N}")

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
    text = pattern.replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\nA-Za-z0-9]").replace(
        r"[^\s\p{L}\p{N}]", r"[^\sA-Za-z0-9]"
    )
    # The library's \s is Unicode white space, which leaves out the four separators 0x1c to 0x1f that re adds.
    text = text.replace(r"\p{L}", "[A-Za-z]").replace(r"\p{N}", "[0-9]")
    return re.compile(
        text.replace(r"[^\s", r"[^ \t-\r").replace(r"\S", r"[^ \t-\r]").replace(r"\s", r"[ \t-\r]")
    )
