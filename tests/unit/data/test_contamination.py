"""A document on both sides of the split is found by its tokens, wherever it lies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from caramba.config.data import DataConfig
from caramba.data import Corpus, open_corpus, open_windows, refuse_overlap, train_bpe, write_token_folder
from caramba.errors import DataError

TEXTS = [f"{number}: " + " ".join(f"w{(number * 7 + i) % 53}" for i in range(30)) for number in range(12)]


def corpus_of(folder: Path, val: list[str], packing: str) -> Corpus:
    write_token_folder(folder, {"train": TEXTS, "val": val}, train_bpe(TEXTS, 280), {"corpus": "test"})
    config = {"type": "tokens", "path": str(folder), "packing": packing, "document_mask": True}
    return open_corpus(DataConfig.model_validate(config))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_document_in_both_splits_is_refused(packing: str, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "both", ["something else", "x" * len(TEXTS[5]), TEXTS[5]], packing)
    windows = open_windows(corpus, "train", 50)
    assert corpus.documents is not None
    fifth = int(corpus.documents[0][5])
    last = int(corpus.documents[1][2])
    reading = [index for index in range(len(windows)) if fifth in windows.documents_of([index])]  # type: ignore[attr-defined]
    others = [index for index in range(len(windows)) if index not in reading]
    assert reading
    assert others
    refuse_overlap(corpus, windows, others, what="surgery")
    with pytest.raises(DataError, match=rf"surgery: the document of \d+ tokens at token {fifth} .* at token {last} "):
        refuse_overlap(corpus, windows, [others[0], reading[-1]], what="surgery")
    if packing == "concat":  # and so it is where documents are read as one stream, the default
        plain = dataclasses.replace(corpus, documents=None)
        refuse_overlap(plain, open_windows(plain, "train", 50), others, what="surgery")
        with pytest.raises(DataError, match=f"at token {fifth} of "):
            refuse_overlap(plain, open_windows(plain, "train", 50), reading[:1], what="surgery")
    flat = dataclasses.replace(corpus, documents=None, source=None)
    refuse_overlap(flat, open_windows(flat, "train", 50), reading, what="surgery")


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_windows_name_the_documents_they_read(packing: str, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path / "apart", ["short"] * 60, packing)
    windows = open_windows(corpus, "train", 40)
    assert corpus.documents is not None
    starts = corpus.documents[0]
    text = np.asarray(corpus.train[: corpus.train.size])
    for index in range(len(windows)):
        x, _, ids = windows[index]
        named = windows.documents_of([index])  # type: ignore[attr-defined]
        pieces = [x[ids == each].numpy().astype(text.dtype).tobytes() for each in ids.unique() if each >= 0]
        ends = [int(starts[starts > first].min(initial=text.size)) for first in named]
        whole = [text[first:end].tobytes() for first, end in zip(named, ends, strict=True)]
        assert all(any(piece in document for document in whole) for piece in pieces)
        assert all(any(piece in document for piece in pieces) for document in whole)
