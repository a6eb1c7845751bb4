from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from caramba.data import TokenDataset
from caramba.data.folder import open_npy
from caramba.errors import DataError


@pytest.mark.parametrize("n", [5, 8, 9, 10, 12, 13, 100])
def test_windows_are_disjoint_and_each_target_counts_once(n: int) -> None:
    tokens = np.arange(n, dtype=np.uint16)
    dataset = TokenDataset(tokens, 4)
    assert len(dataset) == (n - 1) // 4
    inputs = torch.cat([x for x, _ in dataset])
    targets = torch.cat([y for _, y in dataset])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == list(range(4 * len(dataset)))
    assert targets.tolist() == list(range(1, 4 * len(dataset) + 1))


def test_x_and_y_do_not_share_memory() -> None:
    x, y = TokenDataset(np.arange(9), 4)[0]
    x.fill_(0)
    assert y.tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("tokens", "block_size", "message"),
    [
        (np.arange(4), 4, "4 tokens, one window of block_size=4 needs 5"),
        (np.zeros((2, 9), int), 4, r"shape \(2, 9\)"),
        (np.zeros(9), 4, "dtype float64"),
        (np.arange(9), 0, "block_size=0"),
    ],
)
def test_refusals(tokens: np.ndarray, block_size: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TokenDataset(tokens, block_size)


@pytest.mark.parametrize("index", [-1, 2])
def test_index_out_of_range(index: int) -> None:
    with pytest.raises(IndexError, match="of 2"):
        TokenDataset(np.arange(9), 4)[index]


@pytest.mark.parametrize("part", [slice(None), slice(20_001, None), slice(None, -7), slice(11, 40_000)])
def test_a_pickled_dataset_reopens_the_file(tmp_path: Path, part: slice) -> None:
    ids = np.random.default_rng(0).integers(0, 60_000, 50_000).astype(np.uint16)
    np.save(tmp_path / "x.npy", ids)
    dataset = TokenDataset(open_npy(tmp_path / "x.npy")[part], 100)
    sent = pickle.dumps(dataset)
    assert len(sent) < 2000
    copy = pickle.loads(sent)
    assert (copy.tokens == ids[part]).all()
    assert torch.equal(copy[3][1], dataset[3][1])


def test_loader_workers_give_the_same_batches(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(1000))
    dataset = TokenDataset(open_npy(tmp_path / "x.npy"), 10)
    own = list(torch.utils.data.DataLoader(dataset, batch_size=8))
    theirs = list(torch.utils.data.DataLoader(dataset, batch_size=8, num_workers=1))
    assert len(own) == len(theirs)
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(own, theirs, strict=True))
