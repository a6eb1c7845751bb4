"""Scores of given continuations, and greedy text with stop texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.infer.decode import decode_step, prefill
from caramba.layer import unplanned_attention
from caramba.lower.lowering import lower
from caramba.model import Model

KINDS = {torch.float32: KVCacheKind.FP32, torch.float16: KVCacheKind.FP16, torch.bfloat16: KVCacheKind.BF16}

LOGIT_ROWS = {"cpu": 32, "cuda": 4096}
"""Positions whose logits are computed at once: on a CPU those that its cache holds, on a GPU under 1 GB."""


def default_kind(model: Model) -> KVCacheKind:
    """Return the `cache_format` that all attention layers share, else the format of the weights' dtype."""
    formats = {layer.config.cache_format for _, layer in model.attention_layers()}
    trained = formats.pop() if len(formats) == 1 else None
    return trained or KINDS.get(model.embedder.token.weight.dtype, KVCacheKind.FP32)


@dataclass(frozen=True)
class Scored:
    """Log-probability (nats) of a continuation's `n_tokens` tokens, and whether each was the most likely one."""

    logprob: float
    is_greedy: bool
    n_tokens: int

    @property
    def per_token(self) -> float:
        """Mean log-probability per token; 0 for an empty continuation."""
        return self.logprob / self.n_tokens if self.n_tokens else 0.0


@torch.inference_mode()
def score_continuations(
    model: Model,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    max_length: int,
    batch_size: int = 1,
) -> list[Scored]:
    """Return log p(continuation | context) of each pair of id lists, the sum of its tokens' log-probabilities.

    A pair longer than `max_length` + 1 tokens keeps its last ones; the last token of all is scored, not read.
    Pairs of similar length share a batch, padded behind their end, where causality hides it.

    Raises:
        ConfigError: an empty context (give it the end mark), or a continuation longer than `max_length`.
    """
    for index, (context, continuation) in enumerate(pairs):
        if not context or len(continuation) > max_length:
            raise ConfigError(
                f"scoring: pair {index} has {len(context)} context and {len(continuation)} continuation tokens, "
                f"expected at least 1 and at most {max_length}; start it with the end mark, or raise the maximum"
            )
    device = model.embedder.token.weight.device
    order = sorted(range(len(pairs)), key=lambda index: -sum(map(len, pairs[index])))
    scores: dict[int, Scored] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        rows = [[*pairs[index][0], *pairs[index][1]][-(max_length + 1) :] for index in chosen]
        width = max(max(len(row) - 1 for row in rows), 1)
        tokens = torch.zeros(len(rows), width, dtype=torch.int64)
        for at, row in enumerate(rows):
            tokens[at, : len(row) - 1] = torch.tensor(row[:-1], dtype=torch.int64)
        with unplanned_attention(device, tokens.numel() * width):
            hidden = model.hidden(tokens.to(device))
        counts = [len(pairs[index][1]) for index in chosen]
        places = [
            (at, len(row) - 1 - n + i) for at, (row, n) in enumerate(zip(rows, counts, strict=True)) for i in range(n)
        ]
        targets = torch.tensor([token for index in chosen for token in pairs[index][1]], dtype=torch.int64)
        logprobs, is_best = _of_targets(model, hidden, torch.tensor(places, dtype=torch.int64).view(-1, 2), targets)
        for index, own, best in zip(chosen, logprobs.split(counts), is_best.split(counts), strict=True):
            scores[index] = Scored(own.sum().item(), bool(best.all()), len(own))
    return [scores[index] for index in range(len(pairs))]


def _of_targets(model: Model, hidden: Tensor, places: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return float64 log-probabilities of targets [N] after states at places [N, 2], and whether each is largest."""
    found: list[tuple[Tensor, Tensor]] = []
    size = LOGIT_ROWS.get(hidden.device.type, 1024)
    for part, wanted in zip(places.split(size), targets.split(size), strict=True):
        rows, columns = part.to(hidden.device).unbind(1)
        wanted = wanted.to(hidden.device)
        logits = model.logits(hidden[rows, columns])
        logprobs = F.log_softmax(logits.float(), dim=-1).gather(1, wanted[:, None])[:, 0]
        found.append((logprobs.cpu().double(), (logits.argmax(-1) == wanted).cpu()))
    return torch.cat([logprobs for logprobs, _ in found]), torch.cat([best for _, best in found])


@torch.inference_mode()
def greedy_until(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    eos_id: int | None = None,
    is_done: Callable[[list[int]], bool] | None = None,
) -> list[int]:
    """Return the most likely tokens after one prompt, without the end mark that ended them.

    It ends before `eos_id`, at `max_new_tokens`, or after the token with which `is_done(new tokens)` becomes true.

    Raises:
        ConfigError: an empty prompt.
    """
    weight = model.embedder.token.weight
    new: list[int] = []
    if max_new_tokens < 1:
        return new
    with lower(model, weight.device, "decode"):
        context = model.new_context(1, len(prompt) + max_new_tokens, KINDS[weight.dtype])
        logits = prefill(model, torch.tensor([list(prompt)], dtype=torch.int64, device=weight.device), context)
        while True:
            token = int(logits.argmax(-1))
            if token == eos_id:
                return new
            new.append(token)
            if len(new) == max_new_tokens or (is_done is not None and is_done(new)):
                return new
            logits = decode_step(model, torch.tensor([token], device=weight.device), context)
