"""How many threads a decode step takes on a CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from caramba.model import Model

WORTH_THREADS = 1 << 22
"""Multiplications of a step from which it is shared out: below, each of its products ends before threads meet, and
where another process has a core they wait for it at every one."""


def n_weights_of(model: Model) -> int:
    """Return how many weights a model has, what one row of a step multiplies by."""
    return sum(weight.numel() for weight in model.parameters())


@contextlib.contextmanager
def step_threads(model: Model, n_rows: int, n_weights: int | None = None) -> Iterator[None]:
    """Run decode steps of `n_rows` rows with one thread if they are small; restore the count after.

    Pass `n_weights` when calling per step; counting is slow.
    """
    n_threads = torch.get_num_threads()
    is_alone = n_threads == 1 or model.embedder.token.weight.device.type != "cpu"
    if is_alone or n_rows * (n_weights_of(model) if n_weights is None else n_weights) >= WORTH_THREADS:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)
