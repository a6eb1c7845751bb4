"""How many threads a decode step takes on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from caramba.model import Model

WORTH_THREADS = 1 << 22
"""Multiplications of a step from which it is shared out: below, each of its products ends before threads meet, and
where another process has a core they wait for it at every one."""


@contextlib.contextmanager
def step_threads(model: Model, n_rows: int) -> Iterator[None]:
    """Run decode steps of `n_rows` rows in the calling thread alone where they are too small to share, then go on as
    before."""
    n_threads = torch.get_num_threads()
    is_small = n_rows * sum(weight.numel() for weight in model.parameters()) < WORTH_THREADS
    if n_threads == 1 or not is_small or model.embedder.token.weight.device.type != "cpu":
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
