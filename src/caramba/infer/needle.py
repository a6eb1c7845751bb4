"""A pass key hidden in real text: whether a model still finds it when its cache is stored in fewer bits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from caramba.config.kvcache import KVCacheKind
from caramba.data import Tokenizer
from caramba.data.stream import Tokens
from caramba.infer.agreement import cached_hidden
from caramba.model import Model
from caramba.ops.backend import upcast

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
SEED = 0x4EED1E
MARK_TOKENS, KEY_TOKENS = 4, 5  # without a tokenizer: tokens of the text in place of words


@dataclass(frozen=True)
class Needle:
    """A row of tokens whose last ones, the key, also occur at `depth` of it."""

    depth: float
    tokens: tuple[int, ...]
    key: int  # how many tokens


@dataclass(frozen=True)
class NeedleScore:
    """Of one depth: whether every token of the key was the likeliest, and the mean KL from the model without a
    cache over them, in nats."""

    depth: float
    is_found: bool
    kl: float


def make_needles(text: Tokens, length: int, tokenizer: Tokenizer | None) -> list[Needle]:
    """Return a needle per depth, in rows of at most `length` tokens of `text`, each with its own key.

    With a tokenizer the needle is a sentence with five digits, asked for by its beginning; without one it is a mark of
    four tokens and a key of five, sampled from the text's own.
    """
    chooser = random.Random(SEED)
    needles = []
    for index, depth in enumerate(DEPTHS):
        mark, key, end = _sentence(chooser, text, tokenizer)
        room = length - 2 * (len(mark) + len(key)) - len(end)
        start = index * max(0, text.size - room) // len(DEPTHS)
        filler = [int(token) for token in np.asarray(text[start : start + room])]
        at = round(depth * len(filler))
        row = (*filler[:at], *mark, *key, *end, *filler[at:], *mark, *key)
        needles.append(Needle(depth, row, len(key)))
    return needles


@torch.inference_mode()
def find_needles(
    model: Model, needles: list[Needle], kind: KVCacheKind, tail_tokens: int
) -> tuple[list[NeedleScore], list[bool]]:
    """Return what a model finds through a cache of `kind`, and whether it finds each without a cache."""
    device = model.embedder.token.weight.device
    scores: dict[float, NeedleScore] = {}
    without: dict[float, bool] = {}
    for n_key in {needle.key for needle in needles}:
        for length in {len(needle.tokens) for needle in needles if needle.key == n_key}:
            alike = [each for each in needles if (each.key, len(each.tokens)) == (n_key, length)]
            rows = torch.tensor([needle.tokens for needle in alike], device=device)
            targets, fed = rows[:, -n_key:], rows[:, :-1]
            reference = _log_probs(model, model.hidden(fed), n_key)
            cached = _log_probs(model, cached_hidden(model, fed, kind, tail_tokens), n_key)
            kl = (reference.exp() * (reference - cached)).sum(-1).mean(-1).tolist()
            found = (cached.argmax(-1) == targets).all(-1).tolist()
            known = (reference.argmax(-1) == targets).all(-1).tolist()
            for row, needle in enumerate(alike):
                scores[needle.depth] = NeedleScore(needle.depth, found[row], kl[row])
                without[needle.depth] = known[row]
    order = sorted(scores)
    return [scores[depth] for depth in order], [without[depth] for depth in order]


def _log_probs(model: Model, hidden: Tensor, n: int) -> Tensor:
    return F.log_softmax(upcast(model.logits(hidden[:, -n:])), dim=-1)


def _sentence(
    chooser: random.Random, text: Tokens, tokenizer: Tokenizer | None
) -> tuple[list[int], list[int], list[int]]:
    """Return what announces the key, the key, and what ends the sentence."""
    if tokenizer is None:
        drawn = [int(text[chooser.randrange(text.size)]) for _ in range(MARK_TOKENS + KEY_TOKENS)]
        return drawn[:MARK_TOKENS], drawn[MARK_TOKENS:], []
    digits = "".join(chooser.choices("0123456789", k=5))
    return (
        tokenizer.encode("\nThe pass key is"),
        tokenizer.encode(f" {digits}"),
        tokenizer.encode(". Remember it.\n"),
    )
