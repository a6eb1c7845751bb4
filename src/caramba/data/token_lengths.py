"""How many bytes of text each token of a `tokenizers` vocabulary encodes, checked by counting real text."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

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
    is_byte_level = '"ByteLevel"' in json.dumps(definition.get("pre_tokenizer")) + json.dumps(
        definition.get("decoder")
    )
    added = dict(backend.get_added_tokens_decoder())
    alphabet = _alphabet()
    lengths = np.zeros(vocab_size, dtype=np.int32)
    for token, index in backend.get_vocab(with_added_tokens=True).items():
        if index in added:
            lengths[index] = 0 if added[index].special else len(added[index].content.encode())
        elif is_byte_level:
            if not alphabet.issuperset(token):
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


def _alphabet() -> set[str]:
    from tokenizers import pre_tokenizers

    return set(pre_tokenizers.ByteLevel.alphabet())
