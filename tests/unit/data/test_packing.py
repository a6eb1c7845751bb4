from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caramba.config.data import DataConfig
from caramba.config.later import find_unbuilt
from caramba.data import PackedDataset, pack_best_fit
from caramba.errors import DataError


@settings(max_examples=80, deadline=None)
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
    tokens = np.array([10, 11, 12, 0, 20, 21, 0, 30, 31, 32, 33, 34, 35, 0], dtype=np.uint16)
    dataset = PackedDataset(tokens, np.array([0, 4, 7]), 6, pad_id=0)
    items = [dataset[i] for i in range(len(dataset))]
    assert [item["x"].tolist() for item in items] == [[30, 31, 32, 33, 34, 35], [10, 11, 12, 20, 21, 0]]
    assert items[1]["y"].tolist() == [11, 12, 0, 21, 0, -100]
    assert items[1]["document_ids"].tolist() == [0, 0, 0, 1, 1, -1]
    assert items[1]["positions"].tolist() == [0, 1, 2, 0, 1, 0]
    assert items[0]["y"].dtype == torch.int64
    with pytest.raises(DataError, match="first tokens that begin at 0"):
        PackedDataset(tokens, np.array([1, 4]), 6, pad_id=0)
    with pytest.raises(DataError, match="block_size=0"):
        pack_best_fit(np.array([4]), 0)


def test_a_run_with_best_fit_is_refused_until_attention_can_mask() -> None:
    config = DataConfig.model_validate({"type": "tokens", "path": "x", "packing": "best_fit"})
    assert [str(item) for item in find_unbuilt(config)] == [
        "packing=best_fit is not built yet: it comes with attention that takes a document mask"
    ]
    assert not list(find_unbuilt(DataConfig.model_validate({"type": "tokens", "path": "x"})))
