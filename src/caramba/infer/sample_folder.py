"""Writes text that a model samples from a start token as a token folder, resumably: training data of no corpus."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caramba.data.folder import (
    SHARD_TOKENS,
    SPLITS,
    SplitWriter,
    publish_folder,
    token_dtype,
    write_meta,
    write_tokenizer,
)
from caramba.data.prepare import (
    STATE,
    Advance,
    PreparedCorpus,
    find_prepared,
    is_held_out,
    lock_part,
    read_state,
)
from caramba.data.tokenizer import Tokenizer
from caramba.errors import ConfigError, DataError
from caramba.infer.generator import Generator
from caramba.model import Model
from caramba.runs.files import write_json
from caramba.runtime import is_out_of_memory

SPLIT_RULE = "val if the first 7 bytes of sha256('split:' + ids as int64), as a fraction of 2**56, are below val_frac"
LEAST_DOCUMENT = 16
"""Tokens below which a document is left out."""
PREFIX = 64
"""Documents that agree in as many first tokens are duplicates."""
LEAST_DISTINCT = 0.3
"""Share of distinct 4-grams below which a document is a loop."""
_CHECKPOINT_S = 30.0
_IDLE_ROUNDS = 20


@dataclass(frozen=True)
class SampleRequest:
    """What to sample: everything that the tokens depend on, besides the model and the device.

    Attributes:
        tokens: stop after the round of rows that reaches them, over both splits.
        start: the token that begins every row and ends a document within it.
        temperatures: each gets an equal share of the tokens.
        batch: rows of a round.
        length: tokens of a row, its start token included.
        seed: of the first row, one more for each further.
    """

    tokens: int
    start: int
    temperatures: tuple[float, ...] = (0.7, 0.85, 1.0)
    batch: int = 512
    length: int = 1024
    seed: int = 1337
    val_frac: float = 0.05
    shard_tokens: int = SHARD_TOKENS


@dataclass
class _Filter:
    """Cuts rows to documents and leaves out short ones, duplicates and loops."""

    ends: frozenset[int]
    eos_id: int
    vocab_size: int
    seen: set[str]
    counts: dict[str, int]

    def documents(self, row: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the documents of a row, each with an end mark."""
        is_end = (row >= self.vocab_size) | np.isin(row, list(self.ends))
        for piece in np.split(row, np.flatnonzero(is_end)):
            text = piece[1:] if len(piece) and (piece[0] in self.ends or piece[0] >= self.vocab_size) else piece
            reason = self._reason(text)
            if reason is None:
                yield np.append(text, self.eos_id)
            elif len(text):
                self.counts[reason] += 1

    def _reason(self, text: np.ndarray) -> str | None:
        if len(text) < LEAST_DOCUMENT:
            return "short"
        key = hashlib.blake2b(text[:PREFIX].astype(np.int64).tobytes(), digest_size=8).hexdigest()
        if key in self.seen:
            return "duplicate"
        self.seen.add(key)
        grams = np.lib.stride_tricks.sliding_window_view(text, 4)
        distinct = len(np.unique(grams, axis=0)) / len(grams)
        return "loop" if distinct < LEAST_DISTINCT else None


def sample_folder(
    model: Model,
    tokenizer: Tokenizer,
    identity: dict[str, Any],
    request: SampleRequest,
    output: Path,
    *,
    advance: Advance,
    checkpoint_s: float = _CHECKPOINT_S,
) -> tuple[PreparedCorpus, dict[str, int]]:
    """Sample documents and write them as a token folder, without any other data.

    Rows continue after an end mark with another document until they have `length` tokens. All is made in `.NAME.part`
    next to `output` and renamed at the end; a killed command resumes from its last checkpoint.

    Args:
        identity: of the model, as JSON; a folder of another model is refused.
        advance: called with (bytes of text, tokens) so far.

    Returns:
        what was made, and the documents left out by reason.

    Raises:
        ConfigError: memory ran out, or nothing but duplicates is sampled.
        DataError: `output` exists already, or an unfinished folder has other settings.
    """
    facts = _facts(tokenizer, identity, request)
    found = find_prepared(output, facts, is_flat=False)
    if found is not None:
        return found, {}
    part = output.parent / f".{output.name}.part"
    with lock_part(part):
        state = read_state(part, facts)
        if state is None:
            write_tokenizer(part, tokenizer)
            state = {
                "facts": facts,
                "splits": {},
                "place": [0, 0],
                "seen": [],
                "left_out": {"short": 0, "duplicate": 0, "loop": 0},
            }
            write_json(part / STATE, state)
        splits = _write(part, model, tokenizer, request, state, advance, checkpoint_s)
        if splits["train"] is None:
            raise DataError(
                f"{output}: no sampled document falls into train at --val-frac {request.val_frac}; lower it or raise "
                f"--tokens ({part} may be deleted)"
            )
        (part / STATE).unlink()
        more = {"split_rule": SPLIT_RULE, "left_out": state["left_out"]}
        write_meta(part, tokenizer, splits, {**facts, **more})
        publish_folder(part, output)
    kept = {split: value for split, value in splits.items() if value is not None}
    return PreparedCorpus(output, kept, tokenizer.name), state["left_out"]


def _facts(tokenizer: Tokenizer, identity: dict[str, Any], request: SampleRequest) -> dict[str, Any]:
    return {
        "corpus": "sample",
        **identity,
        "tokenizer": tokenizer.hash,
        "val_frac": request.val_frac,
        "shard_tokens": request.shard_tokens,
        "tokens": request.tokens,
        "start": request.start,
        "temperatures": list(request.temperatures),
        "batch": request.batch,
        "length": request.length,
        "seed": request.seed,
    }


def _write(
    part: Path,
    model: Model,
    tokenizer: Tokenizer,
    request: SampleRequest,
    state: dict[str, Any],
    advance: Advance,
    checkpoint_s: float,
) -> dict[str, dict[str, Any] | None]:
    """Run rounds until each temperature has its share; `state` is the place to begin at and gets the last one."""
    lengths, dtype = tokenizer.token_bytes, token_dtype(tokenizer.vocab_size)
    cut = _Filter(
        frozenset((tokenizer.eos_id, request.start)),
        tokenizer.eos_id,
        tokenizer.vocab_size,
        set(state["seen"]),
        state["left_out"],
    )
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                SplitWriter(part, split, dtype, request.shard_tokens, state["splits"].get(split))
            )
            for split in SPLITS
        }

        def done() -> tuple[int, int]:
            return sum(w.bytes for w in writers.values()), sum(w.tokens for w in writers.values())

        advance(*done())
        saved, (first, rounds) = time.monotonic(), state["place"]
        for index in range(first, len(request.temperatures)):
            # One generator a temperature: a captured step holds the temperature as a constant.
            generator = Generator(
                model,
                temperature=request.temperatures[index],
                max_new_tokens=request.length - 1,
                read_every=request.length,
            )
            share = -(-request.tokens * (index + 1) // len(request.temperatures))
            idle = 0
            while done()[1] < share:
                before = done()[1]
                for row in _sample_rows(generator, request, rounds):
                    for ids in cut.documents(row):
                        size = _text_bytes(ids, tokenizer, lengths)
                        split = "val" if is_held_out(ids.astype(np.int64).tobytes(), request.val_frac) else "train"
                        writers[split].add(ids, size)
                rounds += 1
                advance(*done())
                idle = idle + 1 if done()[1] == before else 0
                if idle == _IDLE_ROUNDS:
                    raise ConfigError(
                        f"prepare sample: {idle} rounds of {request.batch} rows gave no new document at temperature "
                        f"{request.temperatures[index]} ({cut.counts}); raise --temperature or name another --start"
                    )
                if time.monotonic() - saved >= checkpoint_s:
                    saved = time.monotonic()
                    state["splits"] = {split: writer.state() for split, writer in writers.items()}
                    write_json(part / STATE, {**state, "place": [index, rounds], "seen": sorted(cut.seen)})
        return {split: writer.finish() for split, writer in writers.items()}


def _sample_rows(generator: Generator, request: SampleRequest, rounds: int) -> Iterator[np.ndarray]:
    first = request.seed + rounds * request.batch
    prompts = torch.full((request.batch, 1), request.start, dtype=torch.int64)
    try:
        rows = generator.generate(prompts, seeds=range(first, first + request.batch))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(
            f"prepare sample: memory ran out with {request.batch} rows of {request.length} tokens; lower --batch or "
            "--length"
        ) from None
    for row in rows:
        yield np.array(row.tokens, dtype=np.int64)


def _text_bytes(ids: np.ndarray, tokenizer: Tokenizer, lengths: np.ndarray | None) -> int:
    return len(tokenizer.decode(ids).encode()) if lengths is None else int(lengths[ids].sum())
