"""What each split of decode attention reads, on a GPU or, by `test_in_the_interpreter.py`, interpreted."""

from __future__ import annotations

import importlib
import os
import random

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.skipif(HAS_GPU == INTERPRETED, reason="needs a CUDA device, or TRITON_INTERPRET=1 without"),
]
BLOCK = 32


def shares(start: int, held: int, length: int, n_splits: int, *, has_tail: bool) -> list[list[int]]:
    """Bounds of what each split reads: low, until, first, high."""
    out = torch.zeros(n_splits, 4, dtype=torch.int64, device=DEVICE)
    importlib.import_module("tests.ops.shares").write_shares[(1,)](
        out, start, held, length, n_splits, 128, BLOCK, has_tail
    )
    return out.tolist()


@pytest.mark.parametrize("has_tail", [False, True], ids=["exact", "with a tail"])
def test_every_token_is_read_once_and_from_where_it_is(has_tail: bool) -> None:
    draw = random.Random(0)
    for _ in range(50):
        n_splits, length = draw.randint(1, 40), draw.choice([0, 1, BLOCK, draw.randint(0, 3000)])
        held = draw.randint(0, length) if has_tail else length
        start = draw.choice([0, draw.randint(0, length) // BLOCK * BLOCK])
        found = shares(start, held, length, n_splits, has_tail=has_tail)
        of_blocks = [n for low, until, _, _ in found for n in range(low, until)]
        of_tail = [n for _, _, first, high in found for n in range(first, high)] if has_tail else []
        case = (start, held, length, n_splits)
        assert sorted(of_blocks + of_tail) == list(range(start, length)), case
        assert all(n < held for n in of_blocks), case
        assert all(n >= held for n in of_tail), case


def test_no_split_is_without_a_share_where_there_are_tiles_for_all() -> None:
    # 33 splits are two programs on each of 132 multiprocessors for eight heads.
    for n_tiles, n_splits in ((1024, 33), (1024, 66), (64, 5), (7, 7), (3, 5)):
        sizes = [
            until - low for low, until, _, _ in shares(0, n_tiles * BLOCK, n_tiles * BLOCK, n_splits, has_tail=False)
        ]
        assert max(sizes) - max(min(sizes), 0) <= BLOCK, (n_tiles, n_splits)
        assert sum(sizes) == n_tiles * BLOCK
