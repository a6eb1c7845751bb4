"""How near a model stays to its teacher on held-out windows: loss, divergence and top-1 agreement, paired."""

import math
import statistics
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from caramba.config.kvcache import KVCacheKind
from caramba.data import IGNORED, Windows, batches, documents_of, spread_windows
from caramba.errors import CarambaError, DataError
from caramba.infer.nll import WindowedNLL
from caramba.model import Model
from caramba.ops.backend import upcast

CHUNK = 1024  # tokens whose logits exist at one time
NORMAL_95 = 1.96

EDGES = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # of the bins of positions in a window


@dataclass(frozen=True)
class PositionBin:
    """Agreement of the predictions at positions `start` to `end` of their windows, `end` included."""

    start: int
    end: int
    ppl_ratio: float
    kl: float
    top1: float


@dataclass(frozen=True)
class Agreement:
    """NLL of a model and its teacher on the same windows, and how near their predictions are.

    Attributes:
        teacher, model: NLL in nats.
        kl: KL(teacher || model) in nats per token.
        top1: share of tokens whose likeliest next token is the teacher's.
        by_position: the same by position in the window, in bins of `EDGES` that hold a counted token.
    """

    teacher: WindowedNLL
    model: WindowedNLL
    kl: float
    top1: float
    by_position: tuple[PositionBin, ...] = ()

    @property
    def delta_nll(self) -> float:
        return self.model.mean - self.teacher.mean

    @property
    def delta_standard_error(self) -> float | None:
        """Standard error of the mean difference, window by window: what both find hard cancels."""
        pairs = zip(self.model.window_means, self.teacher.window_means, strict=True)
        differences = [ours - theirs for ours, theirs in pairs]
        if len(differences) < 2:
            return None
        return statistics.stdev(differences) / math.sqrt(len(differences))

    @property
    def ppl_ratio(self) -> float:
        """exp(delta NLL), the model's perplexity over its teacher's."""
        return math.exp(self.delta_nll)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% interval of `ppl_ratio`: exp(delta -+ 1.96 standard errors)."""
        error = self.delta_standard_error
        if error is None:
            return None
        return math.exp(self.delta_nll - NORMAL_95 * error), math.exp(self.delta_nll + NORMAL_95 * error)


@torch.inference_mode()
def agreement(
    teacher: Model,
    model: Model,
    dataset: Windows,
    *,
    windows: int,
    batch_size: int,
    device: torch.device,
    kind: KVCacheKind | None = None,
    tail_tokens: int = 16,
) -> Agreement:
    """Measure both models on up to `windows` disjoint windows of `dataset`, spread over all of it.

    With `kind` the model reads its keys and values back from a cache of that kind, in chunks of `tail_tokens`, so that
    each token is predicted from what a decode would have stored by then.

    Shape: items as in `Windows`. Logits exist for 1024 tokens at a time, in at least fp32; sums are float64 on the CPU.

    Raises:
        DataError: the dataset has no window, or `kind` is given and documents share windows, which no cache holds.
        CarambaError: the model's loss is not finite.
    """
    indices = spread_windows(len(dataset), windows)
    if not indices:
        raise DataError("held-out data: 0 windows of the asked block_size; use more data or a smaller block_size")
    teacher.eval()
    model.eval()
    columns: list[Tensor] = []
    positions: list[Tensor] = []
    counts: list[Tensor] = []
    for batch in batches(dataset, indices, batch_size):
        x, y = batch[0].to(device), batch[1].to(device)
        documents = documents_of(batch)
        documents = None if documents is None else documents.to(device)
        if kind is not None and documents is not None:
            raise DataError(
                f"held-out data: a cache of kind {kind.value} holds one document per row, and documents share windows "
                "here; use data.packing=concat"
            )
        ours = model.hidden(x, documents=documents) if kind is None else cached_hidden(model, x, kind, tail_tokens)
        pair = teacher.hidden(x, documents=documents), ours
        scores = _scores((teacher, model), pair, y)
        columns.append(scores.sum(-1))
        positions.append(scores.sum(1))
        counts.append((y != IGNORED).cpu())
    totals, counted = torch.cat(columns, 1), torch.cat(counts)
    tokens = counted.sum(1)
    sums = totals.sum(1) / tokens.sum()
    if not bool(sums.isfinite().all()):
        raise CarambaError(f"held-out NLL {sums[1]:.4g} and KL {sums[2]:.4g} are not finite; lower lr")
    means = (totals[:2] / tokens)[:, tokens > 0]
    n = int(tokens.sum())
    return Agreement(
        teacher=WindowedNLL(float(totals[0].sum()), n, tuple(means[0].tolist())),
        model=WindowedNLL(float(totals[1].sum()), n, tuple(means[1].tolist())),
        kl=float(sums[2]),
        top1=float(sums[3]),
        by_position=_bins(torch.stack(positions).sum(0), counted.sum(0)),
    )


def _bins(totals: Tensor, counts: Tensor) -> tuple[PositionBin, ...]:
    """Average sums over all windows, float64 [4, T], by bins of positions. Shape: counts int64 [T]."""
    found = []
    for start, end in zip(EDGES, (*EDGES[1:], len(counts)), strict=True):
        if n := int(counts[start:end].sum()):
            nll, ours, kl, top1 = (totals[:, start:end].sum(1) / n).tolist()
            last = min(end, len(counts)) - 1
            found.append(PositionBin(start, last, math.exp(ours - nll), kl, top1))
    return tuple(found)


def cached_hidden(model: Model, tokens: Tensor, kind: KVCacheKind, tail_tokens: int) -> Tensor:
    """Return what the head reads when every token attends to what a cache of `kind` has stored by then.

    Shape: tokens [B, T] int64 to [B, T, M].
    """
    ctx = model.new_context(tokens.shape[0], tokens.shape[1], kind, static=True, tail_tokens=tail_tokens)
    return torch.cat([model.hidden(part, ctx) for part in tokens.split(tail_tokens, dim=1)], dim=1)


def _scores(models: tuple[Model, Model], hidden: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Return, float64 [4, B, T] on the CPU: NLL of teacher and model, KL, and whether their likeliest tokens agree."""
    flat, chunks = targets.flatten(), []
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        log_p, log_q = (
            F.log_softmax(upcast(model.logits(states.flatten(0, 1)[start : start + CHUNK])), dim=-1)
            for model, states in zip(models, hidden, strict=True)
        )
        nll = [F.nll_loss(scores, part, reduction="none", ignore_index=IGNORED) for scores in (log_p, log_q)]
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        agrees = (log_p.argmax(-1) == log_q.argmax(-1)).to(kl.dtype)
        chunks.append(torch.stack((*nll, kl, agrees)) * (part != IGNORED))
    return torch.cat(chunks, 1).cpu().double().unflatten(1, targets.shape)
