"""What the proxy study measures of a student beside its teacher, on held-out windows and recall samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from proxy_corpus import ProxyCorpus, plant_needles, windows
from torch import Tensor, nn
from torch.nn import functional as F

Autocast = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class HeldOut:
    """Disjoint validation windows [N, T + 1] and recall samples with their answers; the same for every model."""

    text: Tensor
    recall: Tensor
    answers: Tensor
    depths: Tensor


def held_out(
    corpus: ProxyCorpus, n_windows: int, n_recall: int, n_tokens: int, seed: int = 20, shift: int = 0
) -> HeldOut:
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
    return HeldOut(text, *plant_needles(rows, corpus, generator))


@torch.no_grad()
def window_nll(model: nn.Module, data: HeldOut, autocast: Autocast, batch: int) -> np.ndarray:
    """Return the mean NLL of every window in nats per token, [N] float64."""
    out = [
        F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none")
        .view(len(rows), -1)
        .double()
        .mean(1)
        for rows, logits in _logits(model, data.text, autocast, batch)
    ]
    return torch.cat(out).cpu().numpy()


@torch.no_grad()
def recall_by_depth(
    model: nn.Module, data: HeldOut, autocast: Autocast, batch: int, n_depths: int = 5
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


@torch.no_grad()
def agreement(
    teacher: nn.Module, student: nn.Module, data: HeldOut, autocast: Autocast, batch: int
) -> dict[str, float]:
    """Return mean KL(teacher || student) in nats per token and the share of tokens with the same most likely id."""
    kl = same = count = 0.0
    for rows in data.text.split(batch):
        with autocast():
            theirs, ours = teacher(rows[:, :-1]), student(rows[:, :-1])
        a, b = (F.log_softmax(x.flatten(0, 1).float(), -1) for x in (theirs, ours))
        kl += float((a.exp() * (a - b)).sum())
        same += float((theirs.argmax(-1) == ours.argmax(-1)).sum())
        count += a.shape[0]
    return {"kl": kl / count, "top1_agreement": same / count}


def ratio_with_interval(student: np.ndarray, teacher: np.ndarray, draws: int = 2000) -> dict[str, float]:
    """Return exp(mean difference) of paired window NLLs with its 95% bootstrap interval over windows."""
    difference = student - teacher
    rng = np.random.default_rng(0)
    means = difference[rng.integers(0, len(difference), (draws, len(difference)))].mean(1)
    low, high = np.quantile(means, (0.025, 0.975))
    return {
        "ppl_ratio": math.exp(difference.mean()),
        "ppl_ratio_low": math.exp(low),
        "ppl_ratio_high": math.exp(high),
        "delta_nll": float(difference.mean()),
    }


def _logits(
    model: nn.Module, rows: Tensor, autocast: Autocast, batch: int
) -> Iterator[tuple[Tensor, Tensor]]:
    for part in rows.split(batch):
        with autocast():
            yield part, model(part[:, :-1])
