"""tiktoken rank files (`base64-bytes rank` per line) as a tokenizer.json: no tiktoken installation needed."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path

from caramba.data.tokenizer import (
    BYTE_LEVEL,
    CL100K,
    GPT2,
    bpe_definition,
    byte_letters,
    split_step,
    token_entry,
)
from caramba.errors import DataError

_O200K = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_END = "<|endoftext|>"
_BYTES = BYTE_LEVEL | {"use_regex": False}
# A rank file holds neither the pattern that cuts text nor the end mark's id; both follow from its name.
_ENCODINGS: dict[str, tuple[str, int | None]] = {
    "gpt2": (GPT2, 50256),
    "r50k_base": (GPT2, 50256),
    "p50k_base": (GPT2, 50256),
    "cl100k_base": (CL100K, 100257),
    "o200k_base": (_O200K, 199999),
}


def tiktoken_definition(path: Path) -> tuple[str, str, int]:
    """Return (name, tokenizer.json text, end mark's id) of a `.tiktoken` rank file.

    A file with fewer ranks than its encoding has (a cut-down one) gets the first free id as its end mark.

    Raises:
        DataError: the name is of no known encoding, or the content is not ranks of a byte-level BPE.

    Reference: Sennrich, Haddow, Birch 2016, arXiv 1508.07909; a rank is both the id and the order of merging.
    """
    name = next(
        (known for known in sorted(_ENCODINGS, key=len, reverse=True) if path.stem.startswith(known)), None
    )
    if name is None:
        raise DataError(
            f"{path}: a rank file does not say how text is cut into pieces; expected a file name that begins with one"
            f" of {', '.join(_ENCODINGS)}; rename it, or use the model's tokenizer.json"
        )
    ranks = _read_ranks(path)
    pattern, eos_id = _ENCODINGS[name]
    if eos_id is None or max(ranks.values()) < eos_id - 2 or eos_id in ranks.values():
        eos_id = max(ranks.values()) + 1
    table = {byte: letter for letter, byte in byte_letters().items()}

    def spell(token: bytes) -> str:
        return "".join(map(table.__getitem__, token))

    vocab: dict[str, int] = {spell(token): rank for token, rank in ranks.items()}
    vocab[_END] = eos_id
    definition = bpe_definition(
        vocab,
        [[spell(left), spell(right)] for token in ranks for left, right in _splits(token, ranks)],
        added=[token_entry(eos_id, _END)],
        pre_tokenizer={"type": "Sequence", "pretokenizers": [split_step(pattern), _BYTES]},
        decoder=_BYTES,
        ignore_merges=True,  # tiktoken looks a whole piece up before it merges
    )
    return path.stem, json.dumps(definition, ensure_ascii=False), eos_id


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Read the ranks in their order; every single byte must be among them."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise DataError(
                f"{path}: line {number} is {line[:40]!r} ({error}); expected a base64 token, a space and its rank"
            ) from error
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise DataError(
            f"{path}: {len(ranks)} ranks without the byte {missing[0]}; a rank file holds all 256 bytes, copy it again"
        )
    if len(set(ranks.values())) != len(ranks):
        raise DataError(f"{path}: two tokens have one rank; expected distinct ranks, copy the file again")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _splits(token: bytes, ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of entries that makes `token`: tiktoken merges whichever of them it meets, at the token's rank."""
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
    return sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
