"""Opens what names a tokenizer: `byte`, a Hugging Face folder, a tokenizer.json, or a tiktoken rank file."""

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from caramba.config.source import parse_object
from caramba.data.tokenizer import (
    BYTE_LEVEL,
    CL100K,
    EOS,
    GPT2,
    MAX_VOCABULARY,
    ByteTokenizer,
    LibraryTokenizer,
    Tokenizer,
    bpe_definition,
    byte_letters,
    read_definition,
    split_step,
    token_entry,
)
from caramba.errors import DataError
from caramba.runs.files import check_file

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
    name = next((known for known in sorted(_ENCODINGS, key=len, reverse=True) if path.stem.startswith(known)), None)
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


# The end marks of tokenizers in wide use, for a tokenizer.json with no file next to it that names its own.
_END_MARKS = (EOS, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


def load_tokenizer(spec: str | Path, *, name: str | None = None) -> Tokenizer:
    """Open the tokenizer that `spec` names.

    Args:
        spec: `byte`; a folder with tokenizer.json (a Hugging Face model folder, or a token folder); a tokenizer.json;
            a tiktoken rank file such as cl100k_base.tiktoken.
        name: what reports print; without it the folder's or file's name.

    End and start marks are those that special_tokens_map.json or tokenizer_config.json next to the tokenizer.json
    name; without them the end mark is the one usual mark that the vocabulary has.

    Raises:
        DataError: there is no such tokenizer, it cannot be read, or it has no end mark.
    """
    if str(spec) == "byte":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise DataError(_no_definition(path))
        return _from_json(path / "tokenizer.json", name or path.name)
    if not path.is_file():
        raise DataError(
            f"{path}: there is no tokenizer file; expected `byte`, a folder with tokenizer.json, a tokenizer.json or a"
            " .tiktoken rank file"
        )
    if path.suffix == ".tiktoken":
        stem, definition, eos_id = tiktoken_definition(path)
        return LibraryTokenizer(name or stem, definition, _size(_backend(path, definition), path), eos_id)
    return _from_json(path, name)


def _from_json(path: Path, name: str | None) -> Tokenizer:
    check_file(path, DataError)
    definition = read_definition(path)
    if definition.startswith("{") and _parse(path, definition).get("type") == "byte":
        return ByteTokenizer()
    backend = _backend(path, definition)
    marks = _marks(path.parent) if path.name == "tokenizer.json" else {}
    size = _size(backend, path)
    bos_id = _id_of(backend, marks.get("bos_token"), path)
    return LibraryTokenizer(
        name or f"bpe-{size}",
        definition,
        size,
        _end_mark(backend, marks.get("eos_token"), path),
        bos_id=bos_id,
        adds_bos=bos_id is not None and (bool(marks.get("add_bos_token")) or backend.encode("").ids[:1] == [bos_id]),
    )


def _no_definition(folder: Path) -> str:
    held = sorted(file.name for file in folder.iterdir() if file.is_file())[:8]
    text = f"{folder}: no tokenizer.json in this folder, found {', '.join(held) or 'no files'}"
    if (folder / "tokenizer.model").is_file():
        text += (
            "; a bare SentencePiece tokenizer.model is not read: save it with"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    return text


def _parse(path: Path, text: str) -> dict[str, Any]:
    return parse_object(text, f"{path}: not a tokenizer definition", DataError, "copy the file again")


def _backend(path: Path, definition: str) -> Any:
    from tokenizers import Tokenizer as Backend

    try:
        return Backend.from_str(definition)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library's panics in Rust are no Exception
        raise DataError(
            f"{path}: {len(definition)} characters that are not a tokenizer definition ({str(error)[:100]})"
        ) from error


def _size(backend: Any, path: Path) -> int:
    """One more than the largest id: a vocabulary may have gaps."""
    size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if not 0 < size <= MAX_VOCABULARY:
        raise DataError(
            f"{path}: its largest token id is {size - 1}, expected 0 to {MAX_VOCABULARY - 1}; copy the file again"
        )
    return size


def _marks(folder: Path) -> dict[str, Any]:
    """The special tokens that the files next to a tokenizer.json name; the configuration wins over the map."""
    found: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / file).is_file():
            content = _parse(folder / file, read_definition(folder / file))
            found |= {key: value for key, value in content.items() if value is not None}
    return found


def _id_of(backend: Any, mark: Any, path: Path) -> int | None:
    text = mark.get("content") if isinstance(mark, dict) else mark
    if text is None:
        return None
    if not isinstance(text, str):
        raise DataError(f"{path}: a mark next to it is {str(text)[:100]}, expected text; copy the folder again")
    index = backend.token_to_id(text)
    if index is None:
        raise DataError(
            f"{path}: the files next to it name {text[:100]!r} as a mark, and the vocabulary has no such entry;"
            " the files belong to different tokenizers, copy the folder again"
        )
    return int(index)


def _end_mark(backend: Any, mark: Any, path: Path) -> int:
    named = _id_of(backend, mark, path)
    if named is not None:
        return named
    usual = {text: backend.token_to_id(text) for text in _END_MARKS}
    present = {text: index for text, index in usual.items() if index is not None}
    if EOS in present:
        return int(present[EOS])
    if len(present) == 1:
        return int(next(iter(present.values())))
    raise DataError(
        f"{path}: cannot tell which token ends a document: "
        + (f"the vocabulary has {', '.join(present)}" if present else f"it has none of {', '.join(_END_MARKS)}")
        + '; name it in a special_tokens_map.json next to it: {"eos_token": "..."}'
    )
