"""Negative log-likelihood on disjoint windows: the one place where language-model loss is counted."""

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from caramba.data import IGNORED, Windows, batches, documents_of, spread_windows
from caramba.errors import DataError
from caramba.runtime.device import wide_dtype


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


@torch.inference_mode()
def windowed_nll(
    model: nn.Module, dataset: Windows, *, windows: int, batch_size: int, device: torch.device
) -> WindowedNLL:
    """Measure the NLL of `model` on up to `windows` disjoint windows of `dataset`, spread over all of it.

    Shape: items as in `Windows`. Losses are summed in float64.

    Raises:
        DataError: the dataset has no window.
    """
    indices = spread_windows(len(dataset), windows)
    if not indices:
        raise DataError("held-out data: 0 windows of the asked block_size; use more data or a smaller block_size")
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
