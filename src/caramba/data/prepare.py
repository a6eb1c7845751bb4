"""Tokenises a stream of documents into a token folder or a flat .npy, in bounded memory, resumably."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caramba.data.folder import (
    SHARD_TOKENS,
    SPLITS,
    NpyWriter,
    SplitWriter,
    document_batches,
    open_npy,
    publish_folder,
    token_dtype,
    write_meta,
    write_tokenizer,
)
from caramba.data.sources import DocumentSource
from caramba.data.tokenizer import Tokenizer, first_texts, train_bpe
from caramba.data.tokenizer_files import load_tokenizer
from caramba.errors import DataError
from caramba.runs.files import RECORD, named_when_full, record_files, whole_file, write_json

SPLIT_RULE = (
    "val if the first 7 bytes of sha256('split:' + text), as a fraction of 2**56, are below val_frac: equal documents"
    " are always in one split"
)
_CHECKPOINT_BYTES = 32_000_000
STATE = "state.json"
Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class PrepareOptions:
    """What to make: everything that the bytes of the result depend on, besides the source.

    Attributes:
        tokenizer: as `load_tokenizer` takes it; None with `bpe_size`.
        bpe_size: entries of a BPE to train on the first training documents.
        val_frac: share of documents held out by their hash, 0 for none.
        shard_tokens: least tokens of each shard but the last.
        most_tokens: stop after the document that reaches them, over both splits.
    """

    tokenizer: str | None = "byte"
    bpe_size: int | None = None
    val_frac: float = 0.05
    shard_tokens: int = SHARD_TOKENS
    most_tokens: int | None = None


@dataclass(frozen=True)
class PreparedCorpus:
    """What was made: facts per split, the tokenizer's name, and whether it was there already."""

    output: Path
    splits: dict[str, dict[str, Any]]
    tokenizer: str
    was_there: bool = False


def prepare(
    source: DocumentSource,
    request: PrepareOptions,
    output: Path,
    *,
    say: Callable[[str], None],
    advance: Advance,
) -> PreparedCorpus:
    """Write the documents of `source` to `output`: a token folder, or one flat array when its name ends in .npy.

    All is made in `.NAME.part` next to `output` and renamed at the end. A killed preparation resumes from its last
    checkpoint (every 32 MB of text) when it is started again with the same settings, and ends with the same bytes.

    Args:
        source: documents in a fixed order.
        request: tokenizer, split and sizes.
        output: must not exist, unless it is a folder that the same request made.
        say: called with a line for each event.
        advance: called with (bytes of text, tokens) done so far, including what a former start did.

    Raises:
        DataError: `output` exists already, an unfinished preparation has other settings, or train gets no
            document.
    """
    is_flat = output.suffix == ".npy"
    facts = _facts(source, request)
    found = find_prepared(output, facts, is_flat)
    if found is not None:
        return found
    part = output.parent / f".{output.name}.part"
    with lock_part(part):
        state = read_state(part, facts)
        if state is None:
            tokenizer = _make_tokenizer(source, request, say)
            write_tokenizer(part, tokenizer)
            state = {"facts": facts, "tokenizer": tokenizer.name, "splits": {}, "source": None}
            write_json(part / STATE, state)
        else:
            tokenizer = load_tokenizer(part, name=state.get("tokenizer"))
            say(f"resuming the unfinished preparation in {part}")
        splits = _write_splits(part, source, request, tokenizer, state, advance)
        skipped = list(getattr(source, "not_utf8", []))
        if splits["train"] is None and splits["val"] is None and skipped:
            raise DataError(f"{', '.join(skipped[:5])}: not UTF-8 text, and there is no other; convert it to UTF-8")
        if splits["train"] is None:
            raise DataError(
                f"{output}: none of the documents falls into train at val_frac={request.val_frac}; lower --val-frac or"
                f" give more documents ({part} may be deleted)"
            )
        if is_flat:
            flatten(part, splits["train"]["shards"], tokenizer, output)
            shutil.rmtree(part)
        else:
            (part / STATE).unlink()
            write_meta(part, tokenizer, splits, {**facts, "split_rule": SPLIT_RULE, "not_utf8": skipped})
            publish_folder(part, output)
    kept = {split: value for split, value in splits.items() if value is not None}
    return PreparedCorpus(output, kept, tokenizer.name)


def _facts(source: DocumentSource, request: PrepareOptions) -> dict[str, Any]:
    """What the result depends on, as JSON; a tokenizer by its content, so that a moved file is the same."""
    named = None if request.tokenizer is None else load_tokenizer(request.tokenizer).hash
    return {
        **source.identity,
        "tokenizer": named or f"bpe of {request.bpe_size} entries, trained here",
        "val_frac": request.val_frac,
        "shard_tokens": request.shard_tokens,
        "most_tokens": request.most_tokens,
    }


def find_prepared(output: Path, facts: dict[str, Any], is_flat: bool) -> PreparedCorpus | None:
    if not output.exists():
        return None
    meta_path = output / "meta.json"
    if not is_flat and meta_path.is_file():
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        if {key: meta.get("source", {}).get(key) for key in facts} == facts:
            return PreparedCorpus(output, meta["splits"], meta["tokenizer"]["name"], was_there=True)
    raise DataError(
        f"{output}: already exists, made from other text or with other settings; give another --output or delete it"
    )


def read_state(part: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    path = part / STATE
    if not path.is_file():
        return None
    state = json.loads(path.read_text(encoding="utf-8"))
    # Through JSON and back: a tuple of the request is a list in the file.
    wanted = json.loads(json.dumps(facts))
    different = [key for key in wanted if state["facts"].get(key) != wanted[key]]
    if different:
        shown = ", ".join(f"{key} was {state['facts'].get(key)!r}, is {wanted[key]!r}" for key in different[:3])
        raise DataError(
            f"{part}: an unfinished preparation with other settings or changed files ({shown}); give the same again to"
            " resume it, or delete the folder to start again"
        )
    return state


def _make_tokenizer(source: DocumentSource, request: PrepareOptions, say: Callable[[str], None]) -> Tokenizer:
    if request.tokenizer is not None:
        return load_tokenizer(request.tokenizer)
    assert request.bpe_size is not None
    say(f"training a byte-level BPE of {request.bpe_size} entries on the first training documents")
    seen = (text for text in source.documents(None) if not is_held_out(text.encode(), request.val_frac))
    return train_bpe(first_texts(seen), request.bpe_size)


def _write_splits(
    part: Path,
    source: DocumentSource,
    request: PrepareOptions,
    tokenizer: Tokenizer,
    state: dict[str, Any],
    advance: Advance,
) -> dict[str, dict[str, Any] | None]:
    dtype = token_dtype(tokenizer.vocab_size)
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                SplitWriter(part, split, dtype, request.shard_tokens, state["splits"].get(split))
            )
            for split in SPLITS
        }

        def done() -> tuple[int, int]:
            return sum(w.bytes for w in writers.values()), sum(w.tokens for w in writers.values())

        saved = done()[0]
        advance(*done())
        for batch in document_batches(source.documents(state["source"])):
            is_last = _add(batch, tokenizer, writers, request)
            size, tokens = done()
            advance(size, tokens)
            if is_last:
                break
            if size - saved >= _CHECKPOINT_BYTES:
                saved = size
                places = {split: writer.state() for split, writer in writers.items()}
                place = source.state()
                write_json(part / STATE, {**state, "splits": places, "source": place})
        return {split: writer.finish() for split, writer in writers.items()}


def _add(batch: list[str], tokenizer: Tokenizer, writers: dict[str, SplitWriter], request: PrepareOptions) -> bool:
    """Append a batch; return whether it reached `most_tokens`, which may leave its last documents out."""
    for ids, text in zip(tokenizer.encode_documents(batch), batch, strict=True):
        if request.most_tokens and sum(w.tokens for w in writers.values()) >= request.most_tokens:
            return True
        content = text.encode()
        writers["val" if is_held_out(content, request.val_frac) else "train"].add(ids, len(content))
    return False


def is_held_out(content: bytes, val_frac: float) -> bool:
    digest = hashlib.sha256(b"split:" + content).digest()
    return int.from_bytes(digest[:7], "big") / 2**56 < val_frac


def flatten(part: Path, shards: list[dict[str, Any]], tokenizer: Tokenizer, output: Path) -> None:
    """Join the shards to one .npy, and store the tokenizer next to it: a bare array does not name one."""
    with whole_file(output) as temporary, NpyWriter(temporary, token_dtype(tokenizer.vocab_size)) as out:
        for shard in shards:
            tokens = open_npy(part / shard["file"])
            for start in range(0, tokens.size, 1 << 20):
                out.append(tokens[start : start + (1 << 20)])
    folder = output.with_suffix(".tokenizer")
    folder.mkdir(exist_ok=True)
    tokenizer.save(folder / "tokenizer.json")
    (folder / RECORD).unlink(missing_ok=True)
    record_files(folder, [*sorted(file for file in folder.iterdir() if not file.name.startswith(".")), output])


@contextlib.contextmanager
def lock_part(part: Path) -> Iterator[None]:
    """Hold the unfinished folder; the kernel drops the lock with the process, so a kill leaves nothing to clean."""
    part.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(part, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{part}: another process is preparing this output; wait for it, or give another --output"
            ) from error
        with named_when_full(part):
            yield
    finally:
        os.close(descriptor)
