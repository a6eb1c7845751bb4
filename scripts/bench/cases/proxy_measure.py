"""The held-out windows and recall samples of the proxy study, and the recall of a model. Loss and agreement with the
teacher are those of `caramba.metrics`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from cases.proxy_corpus import ProxyCorpus, plant_needles, windows
from torch import Tensor, nn

Autocast = Callable[[], AbstractContextManager]


class Text:
    """Token rows [N, T + 1] as the windows (x [T], y [T]) that `caramba.metrics` reads."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


@dataclass(frozen=True)
class EvalWindows:
    """Disjoint validation windows and recall samples with their answers; the same for every model."""

    text: Text
    recall: Tensor
    answers: Tensor
    depths: Tensor


def held_out(
    corpus: ProxyCorpus, n_windows: int, n_recall: int, n_tokens: int, seed: int = 20, shift: int = 0
) -> EvalWindows:
    """Return disjoint windows spread over the validation split, and recall samples made of random ones.

    Another `shift`, below the number of windows of the split over `n_windows`, gives other windows.
    """
    width = n_tokens + 1
    available = corpus.val.numel() // width
    n_windows = min(n_windows, available)
    chosen = (torch.linspace(0, available - 1, n_windows).round().long() + shift) % available
    text = torch.stack([corpus.val[i * width : (i + 1) * width] for i in chosen.tolist()]).long()
    generator = torch.Generator(corpus.val.device).manual_seed(seed)
    rows = windows(corpus.val, n_recall, width, generator)
    return EvalWindows(Text(text), *plant_needles(rows, corpus, generator))


@torch.no_grad()
def recall_by_depth(
    model: nn.Module, data: EvalWindows, autocast: Autocast, batch: int, n_depths: int = 5
) -> list[float]:
    """Return the share of needles whose two value ids are both the most likely ones, from shallow to deep."""
    hits = []
    place = 0
    for rows, logits in _logits(model, data.recall, autocast, batch):
        best = logits.argmax(-1)
        answers = data.answers[place : place + len(rows)]
        # logits at t predict row[t + 1]
        both = [best.gather(1, answers - 1 + i) == rows.gather(1, answers + i) for i in (0, 1)]
        hits.append(both[0] & both[1])
        place += len(rows)
    hit = torch.cat(hits).float()
    bucket = (data.depths * n_depths).long().clamp_max(n_depths - 1)
    return [float(hit[bucket == i].mean()) for i in range(n_depths)]


def _logits(
    model: nn.Module, rows: Tensor, autocast: Autocast, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for part in rows.split(batch):
        with autocast():
            yield part, model(part[:, :-1])
