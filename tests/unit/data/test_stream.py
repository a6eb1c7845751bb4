from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from caramba.data import TokenDataset, TokenStream
from caramba.data.folder import open_npy
from caramba.errors import DataError


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    whole = np.arange(1000, dtype=np.uint16)
    parts = np.split(whole, [300, 301, 700])
    for index, part in enumerate(parts):
        np.save(tmp_path / f"{index}.npy", part)
    return TokenStream([open_npy(tmp_path / f"{index}.npy") for index in range(len(parts))])


def test_slices_are_those_of_one_array(stream: TokenStream) -> None:
    whole = np.arange(1000)
    assert (len(stream), stream.shape, stream.dtype) == (1000, (1000,), np.uint16)
    edges = [0, 1, 299, 300, 301, 302, 699, 700, 701, 999, 1000, 1500]
    for start in edges:
        for stop in edges:
            assert stream[start:stop].tolist() == whole[start:stop].tolist()
            if start < stop <= 1000:
                assert np.asarray(stream.part(start, stop)).tolist() == whole[start:stop].tolist()
    assert stream[-5:].tolist() == whole[-5:].tolist()
    assert [int(stream[i]) for i in (0, 300, 999, -1)] == [0, 300, 999, 999]
    with pytest.raises(IndexError):
        stream[1000]
    with pytest.raises(IndexError, match="step 2"):
        stream[::2]


def test_a_slice_in_one_part_is_not_copied(stream: TokenStream) -> None:
    assert np.shares_memory(stream[400:500], stream.parts[2])
    assert np.shares_memory(stream.part(400, 900).parts[0], stream.parts[2])


def test_windows_cross_shards_and_pickle_small(stream: TokenStream) -> None:
    one = TokenDataset(np.arange(1000, dtype=np.uint16), 64)
    for tokens in (stream, stream.part(0, 1000)):
        many = TokenDataset(tokens, 64)
        assert len(many) == len(one)
        assert all(torch.equal(a, b) for i in range(len(one)) for a, b in zip(many[i], one[i], strict=True))
    sent = pickle.dumps(many)
    assert len(sent) < 2000
    assert torch.equal(pickle.loads(sent)[4][1], one[4][1])


def test_parts_must_agree() -> None:
    with pytest.raises(DataError, match="of one dtype"):
        TokenStream([np.zeros(2, np.uint16), np.zeros(2, np.uint32)])
    with pytest.raises(DataError, match="0 parts"):
        TokenStream([])
