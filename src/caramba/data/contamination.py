"""Is what a model is fitted on held out of what it is judged by? Answered document by document, by hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from caramba.data.corpus import Corpus
from caramba.data.dataset import DocumentDataset, PackedDataset, TokenDataset, documents_read
from caramba.data.stream import Tokens
from caramba.errors import DataError

LEAST_TOKENS = 64  # shorter documents are equal by chance, or boilerplate


def refuse_overlap(corpus: Corpus, windows: TokenDataset, indices: Sequence[int], *, what: str) -> None:
    """Check that no document which windows of the train split read is in the evaluation split too.

    Documents of fewer than 64 tokens do not count, and it makes no difference whether documents are separate. A flat
    file names no documents, so there is nothing to compare: its splits share no position.

    Raises:
        DataError: a document is in both; the message names it.
    """
    if corpus.index is None:
        return
    starts, held_out = corpus.index
    packs = isinstance(windows, DocumentDataset | PackedDataset)
    firsts = windows.documents_of(indices) if packs else documents_read(starts, indices, windows.block_size)
    chosen = np.searchsorted(starts, firsts)
    lengths = np.diff(starts, append=corpus.train.size)
    chosen = chosen[lengths[chosen] >= LEAST_TOKENS]
    read = {_hash(corpus.train, int(starts[each]), int(lengths[each])): int(starts[each]) for each in chosen}
    sizes = np.diff(held_out, append=corpus.val.size)
    for each in np.flatnonzero(np.isin(sizes, lengths[chosen])):
        first = int(held_out[each])
        same = read.get(_hash(corpus.val, first, int(sizes[each])))
        if same is not None:
            raise DataError(
                f"{what}: the document of {sizes[each]} tokens at token {same} of {corpus.paths[0]} is also in the "
                f"evaluation split, at token {first} of {corpus.paths[1]}; remove one of them, or make the folder with "
                "`caramba prepare text`, which holds documents out by their hash"
            )


def _hash(tokens: Tokens, first: int, length: int) -> bytes:
    ids = np.asarray(tokens[first : first + length]).astype(np.int64)
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
