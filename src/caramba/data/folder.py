"""Token folders: train.npy, val.npy, tokenizer.json, token_bytes.npy and meta.json, made whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from caramba.data.npy import NpyWriter, open_npy, token_dtype
from caramba.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from caramba.errors import DataError
from caramba.runs.files import sha256_of, whole_file, write_json

SCHEMA = 1
SPLITS = ("train", "val")
Progress = Callable[[str], None]
_BATCH_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class TokenFolder:
    """An open token folder: what meta.json says, and the arrays behind it, memory-mapped."""

    path: Path
    meta: dict[str, Any]
    train: np.memmap
    val: np.memmap | None
    tokenizer: Tokenizer

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes per token, int32 [V], from token_bytes.npy."""
        return np.asarray(open_npy(self.path / "token_bytes.npy"))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of meta.json's content, which holds the hashes of both splits."""
        return hashlib.sha256(json.dumps(self.meta, sort_keys=True).encode()).hexdigest()


def write_token_folder(
    folder: Path,
    splits: Mapping[str, Iterable[str]],
    tokenizer: Tokenizer,
    source: Mapping[str, Any],
    *,
    progress: Progress | None = None,
) -> None:
    """Encode the documents of `splits` (train, val) and write a token folder at `folder`.

    Everything is made in a temporary folder beside it and renamed, so that an interrupt leaves nothing and of two
    processes that make the same folder at once the first one's stays.

    Args:
        folder: where it shall be; an existing one is left as it is.
        splits: texts of the documents of `train` and of `val`; may be generators.
        tokenizer: ends each document with its end mark.
        source: facts about the corpus, kept in meta.json; must not hold times, since it is fingerprinted.
        progress: told what is being done.

    Raises:
        DataError: a split has no documents.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        tokenizer.save(temporary / "tokenizer.json")
        with whole_file(temporary / "token_bytes.npy") as part, NpyWriter(part, np.dtype(np.int32)) as out:
            out.append(tokenizer.token_bytes)
        dtype = token_dtype(tokenizer.vocab_size)
        facts = {}
        for split in SPLITS:
            path = temporary / f"{split}.npy"
            facts[split] = _write_split(path, split, splits[split], tokenizer, dtype, progress)
            facts[split]["sha256"] = sha256_of(path)
        meta = {
            "schema": SCHEMA,
            "tokenizer": {
                "name": tokenizer.name,
                "vocab_size": tokenizer.vocab_size,
                "hash": tokenizer.hash,
                "eos_id": tokenizer.eos_id,
            },
            "dtype": dtype.name,
            "splits": facts,
            "source": dict(source),
        }
        write_json(temporary / "meta.json", meta)
        os.chmod(temporary, 0o755)
        try:
            os.rename(temporary, folder)
        except OSError:
            if not (folder / "meta.json").is_file():  # not another process's finished folder: a real failure
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_split(
    path: Path,
    split: str,
    texts: Iterable[str],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    progress: Progress | None,
) -> dict[str, Any]:
    documents = size = 0
    max_id = 0
    with whole_file(path) as part, NpyWriter(part, dtype) as out:
        for batch in _batches(texts):
            for ids in tokenizer.encode_documents(batch):
                out.append(ids)
                max_id = max(max_id, int(ids.max()))
            documents += len(batch)
            size += sum(len(text.encode()) for text in batch)
            if progress:
                progress(f"encoding {split}: {size / 1e6:.1f} MB, {out.count:,} tokens")
        tokens = out.count
    if documents == 0:
        raise DataError(f"{path.parent}: the {split} split has no documents; expected at least one")
    return {"tokens": tokens, "bytes": size, "documents": documents, "max_id": max_id}


def _batches(texts: Iterable[str]) -> Iterable[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def open_token_folder(folder: Path) -> TokenFolder:
    """Open a token folder without reading its tokens.

    Raises:
        DataError: a file is missing, damaged, or does not agree with meta.json.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    stated = meta["tokenizer"]
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise DataError(
            f"{tokenizer_path}: missing; a token folder has it beside meta.json. Prepare it again"
        )
    definition = tokenizer_path.read_text(encoding="utf-8")
    if stated["name"] == "byte":
        tokenizer: Tokenizer = ByteTokenizer()
        tokenizer.definition = definition
    else:
        tokenizer = BPETokenizer(stated["name"], definition, stated["vocab_size"], stated["eos_id"])
    if tokenizer.hash != stated["hash"]:
        raise DataError(
            f"{tokenizer_path}: hash {tokenizer.hash[:16]}, but meta.json says the tokens were made with"
            f" {stated['hash'][:16]}; the tokenizer was replaced. Prepare the folder again"
        )
    arrays = {split: _open_split(folder, split, meta) for split in SPLITS}
    train = arrays["train"]
    assert train is not None  # _read_meta requires it
    return TokenFolder(folder, meta, train, arrays["val"], tokenizer)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    if not path.is_file():
        raise DataError(
            f"{folder}: no meta.json in this folder, so it is not a token folder;"
            " expected train.npy, val.npy, tokenizer.json, token_bytes.npy and meta.json. If it is a cache, delete it"
        )
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
        schema = meta["schema"]
        sizes = [
            meta["splits"]["train"]["tokens"],
            meta["tokenizer"]["vocab_size"],
            meta["tokenizer"]["eos_id"],
        ]
        strings = [meta["tokenizer"]["name"], meta["tokenizer"]["hash"], meta["dtype"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: {type(error).__name__}: {error}; expected what write_token_folder writes"
        ) from error
    if schema != SCHEMA:
        raise DataError(
            f"{path}: schema {schema}, expected {SCHEMA}; prepare the folder again with this version"
        )
    if not all(isinstance(s, int) for s in sizes) or not all(isinstance(s, str) for s in strings):
        raise DataError(
            f"{path}: sizes {sizes} must be integers and {strings} strings; prepare the folder again"
        )
    return meta


def _open_split(folder: Path, split: str, meta: dict[str, Any]) -> np.memmap | None:
    facts = meta["splits"].get(split)
    if facts is None:
        return None
    tokens = open_npy(folder / f"{split}.npy")
    if tokens.size != facts["tokens"] or tokens.dtype != np.dtype(meta["dtype"]):
        raise DataError(
            f"{folder / split}.npy: {tokens.size} tokens of {tokens.dtype}, but meta.json says {facts['tokens']} of"
            f" {meta['dtype']}; delete or prepare the folder again"
        )
    return tokens
