"""Negative log-likelihood on disjoint windows: the one place where language-model loss is counted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.data import IGNORED
from caramba.errors import DataError
from caramba.runtime.device import wide_dtype


class Windows(Protocol):
    """Disjoint windows of tokens: item i is (x [T], y [T]) int64, y shifted by one and -100 where nothing counts.

    If attention is masked per document it also has document ids [T], -1 for padding.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class WindowedNLL:
    """NLL in nats of `tokens` distinct targets, and each window's mean, from which the standard error follows.

    Only targets that count are in it: neither padding nor the first token of a document after another.
    """

    total: float
    tokens: int
    window_means: tuple[float, ...]

    @property
    def mean(self) -> float:
        return self.total / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.mean)

    @property
    def standard_error(self) -> float:
        """Standard error of the mean over windows, which are far closer to independent than tokens are."""
        n = len(self.window_means)
        if n < 2:
            return float("nan")
        centre = sum(self.window_means) / n
        return math.sqrt(sum((value - centre) ** 2 for value in self.window_means) / (n - 1) / n)


def spread_windows(available: int, wanted: int) -> list[int]:
    """Return up to `wanted` distinct window indices, evenly spread over `available` ones, in order."""
    count = min(available, wanted)
    return [index * available // count for index in range(count)] if count else []


def batches(dataset: Windows, indices: Sequence[int], size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield windows in order, as (x, y) or (x, y, document ids) of shape [b, T], b <= size."""
    for start in range(0, len(indices), size):
        items = [dataset[index] for index in indices[start : start + size]]
        yield tuple(torch.stack(parts) for parts in zip(*items, strict=True))


def documents_of(batch: Sequence[Tensor]) -> Tensor | None:
    """Return the document ids [B, T] of a batch, -1 for padding; None without document masking."""
    return next((part for part in batch[2:] if part.dim() == 2), None)


def samples_of(batch: Sequence[Tensor]) -> Tensor | None:
    """Return the samples' indices [B] of a batch that carries them."""
    return next((part for part in batch[2:] if part.dim() == 1), None)


@torch.inference_mode()
def windowed_nll(
    model: nn.Module,
    dataset: Windows,
    *,
    windows: int,
    batch_size: int,
    device: torch.device,
) -> WindowedNLL:
    """Measure the NLL of `model` on up to `windows` disjoint windows of `dataset`, spread over all of it.

    Shape: items as in `Windows`. Losses are summed in float64.

    Raises:
        DataError: the dataset has no window.
    """
    indices = spread_windows(len(dataset), windows)
    if not indices:
        raise DataError(
            "held-out data: 0 windows of the asked block_size; use more data or a smaller block_size"
        )
    was_training = model.training
    model.eval()
    means: list[float] = []
    total, tokens = 0.0, 0
    for batch in batches(dataset, indices, batch_size):
        x, y, *_ = (part.to(device) for part in batch)
        documents = documents_of(batch)
        logits = model(x) if documents is None else model(x, documents=documents.to(device))
        losses = (
            F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none", ignore_index=IGNORED)
            .view(y.shape)
            .to(wide_dtype(logits.device))
        )
        counts = (y != IGNORED).sum(dim=1)
        means += (losses.sum(dim=1) / counts)[counts > 0].tolist()
        total += losses.sum().item()
        tokens += int(counts.sum())
    model.train(was_training)
    return WindowedNLL(total, tokens, tuple(means))
