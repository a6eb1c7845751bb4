from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from caramba.config.data import DataConfig
from caramba.data import (
    IGNORED,
    ByteTokenizer,
    DocumentDataset,
    PackedDataset,
    WindowSampler,
    count_targets,
    open_corpus,
    open_windows,
    pack_best_fit,
)
from caramba.data.folder import SplitWriter, open_npy, write_meta, write_tokenizer
from caramba.errors import DataError
from tests.examples import examples

TOKENS = np.array([10, 11, 12, 0, 20, 21, 0, 30, 31, 32, 33, 34, 35, 0], dtype=np.uint16)
STARTS = np.array([0, 4, 7])


@settings(max_examples=examples(80), deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40), block_size=st.integers(1, 16))
def test_every_prediction_is_in_one_window(lengths: list[int], block_size: int) -> None:
    windows = pack_best_fit(np.array(lengths), block_size)
    seen = [(d, start + i) for window in windows for d, start, count in window for i in range(count)]
    assert sorted(seen) == [(d, i) for d, n in enumerate(lengths) for i in range(n - 1)]
    assert all(0 < sum(count for _, _, count in window) <= block_size for window in windows)


def test_best_fit_takes_the_tightest_window() -> None:
    # runs 7, 6, 3, 2 of a window of 10: 3 fits both, best in the window of 7; then 2 goes to that of 6
    assert pack_best_fit(np.array([8, 7, 4, 3]), 10) == [[(0, 0, 7), (2, 0, 3)], [(1, 0, 6), (3, 0, 2)]]


def test_items_keep_documents_apart() -> None:
    dataset = PackedDataset(TOKENS, STARTS, 6, pad_id=0)
    (x, y, documents), (x1, y1, documents1) = (dataset[i] for i in range(len(dataset)))
    assert [x.tolist(), x1.tolist()] == [[30, 31, 32, 33, 34, 35], [10, 11, 12, 20, 21, 0]]
    assert y1.tolist() == [11, 12, 0, 21, 0, -100]
    assert documents1.tolist() == [0, 0, 0, 1, 1, -1]
    assert documents.tolist() == [0] * 6
    assert y.dtype == documents.dtype == torch.int64
    assert dataset.window_targets.tolist() == [6, 5]
    assert dataset.padding == pytest.approx(1 / 12)
    with pytest.raises(IndexError, match="window 2 of 2"):
        dataset[2]
    with pytest.raises(DataError, match="first tokens that begin at 0"):
        PackedDataset(TOKENS, np.array([1, 4]), 6, pad_id=0)
    with pytest.raises(DataError, match="block_size=0"):
        pack_best_fit(np.array([4]), 0)


@settings(max_examples=examples(60), deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), block_size=st.integers(1, 9))
def test_each_prediction_inside_a_document_counts_once(lengths: list[int], block_size: int) -> None:
    """Both ways to keep documents apart: tokens are their own places, so a target says where it is from."""
    starts = np.cumsum([0, *lengths[:-1]])
    tokens = np.arange(sum(lengths))
    document = np.repeat(np.arange(len(lengths)), lengths)
    if tokens.size <= block_size:
        return
    inside = [i for i in tokens[1:] if document[i] == document[i - 1]]
    packed = PackedDataset(tokens, starts, block_size, pad_id=0) if inside else None
    stream = DocumentDataset(tokens, starts, block_size)
    covered = len(stream) * block_size  # the last incomplete window of a stream is left out
    for dataset, expected in ((packed, inside), (stream, [i for i in inside if i <= covered])):
        if dataset is None:
            continue
        found = []
        for index in range(len(dataset)):
            x, y, ids = (part.numpy() for part in dataset[index])
            counted = y != IGNORED
            assert (y[counted] == x[counted] + 1).all()
            assert counted.sum() == dataset.window_targets[index]
            found += y[counted].tolist()
            real = ids >= 0
            same = ids[real][1:] == ids[real][:-1]
            assert (same == (document[x[real]][1:] == document[x[real]][:-1])).all() or dataset is packed
            assert all(len(set(document[x[ids == one]])) == 1 for one in set(ids[real].tolist()))
        assert sorted(found) == expected


@settings(max_examples=examples(40), deadline=None)
@given(
    targets=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    start=st.integers(0, 30),
    samples=st.integers(0, 60),
)
def test_targets_are_counted_as_the_sampler_yields_them(targets: list[int], start: int, samples: int) -> None:
    sampler = WindowSampler(len(targets), 1, seed=5)
    expected = sum(targets[sampler.window(start + i)] for i in range(samples))
    assert count_targets(np.array(targets), 5, start, samples) == expected


def test_held_out_tokens_of_a_folder_without_val_start_in_the_document_that_was_cut(tmp_path: Path) -> None:
    texts = ["alpha beta", "gamma", "delta epsilon zeta", "eta"]
    write = SplitWriter(tmp_path, "train", np.dtype(np.uint16), 10**6)
    tokenizer = ByteTokenizer()
    with write as out:
        for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
            out.add(ids, len(text))
        facts = out.finish()
    write_tokenizer(tmp_path, tokenizer)
    write_meta(tmp_path, tokenizer, {"train": facts}, {})
    config = DataConfig(type="tokens", path=str(tmp_path), packing="best_fit", val_frac=0.3)
    corpus = open_corpus(config)
    assert corpus.documents is not None
    for tokens, starts in zip((corpus.train, corpus.val), corpus.documents, strict=True):
        ends = np.flatnonzero(np.asarray(tokens[:]) == 256) + 1
        assert starts.tolist() == [0, *ends[ends < tokens.size].tolist()]
    windows = open_windows(corpus, "val", 8)
    assert sum(windows.window_targets) == corpus.val.size - len(corpus.documents[1])
    assert open_corpus(config.model_copy(update={"packing": "concat"})).documents is None


@pytest.mark.parametrize("asked", [{"packing": "best_fit"}, {"document_mask": True}])
@pytest.mark.parametrize("paths", [{"path": "x.npy"}, {"path": "x.tokens"}, {"path": "folder", "val_path": "x.npy"}])
def test_flat_files_are_refused_by_name(asked: dict[str, object], paths: dict[str, str]) -> None:
    flat = next(f"{name}={path}" for name, path in paths.items() if "." in path)
    with pytest.raises(ValidationError, match=f"documents begin, and {flat} is a flat file"):
        DataConfig.model_validate({"type": "tokens", **paths, **asked})
    assert not DataConfig.model_validate({"type": "tokens", **paths}).keeps_documents_apart


def test_best_fit_without_masks_is_refused() -> None:
    with pytest.raises(ValidationError, match="always separates documents"):
        DataConfig.model_validate({"type": "tokens", "path": "x", "packing": "best_fit", "document_mask": False})


def test_packed_windows_reach_worker_processes_without_their_tokens(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(1, 60_000, 50_000).astype(np.uint16)
    np.save(tmp_path / "x.npy", ids)
    starts = np.arange(0, 50_000, 1000)
    tokens = open_npy(tmp_path / "x.npy")
    for dataset in (PackedDataset(tokens, starts, 100, pad_id=0), DocumentDataset(tokens, starts, 100)):
        sent = pickle.dumps(dataset)
        assert len(sent) < 20_000
        copy = pickle.loads(sent)
        assert all(torch.equal(a, b) for a, b in zip(copy[7], dataset[7], strict=True))
