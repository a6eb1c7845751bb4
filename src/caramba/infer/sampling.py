"""The exact distribution that the next token is sampled from."""

import torch
from torch import Tensor

from caramba.config.generate import GenerateConfig
from caramba.ops import has_kernel
from caramba.ops.sample import argmax_logprob, draw, sample
from caramba.runtime.device import wide_dtype


def distribution(logits: Tensor, config: GenerateConfig, seen: Tensor | None = None) -> Tensor:
    """Return the probabilities p of the next token: of softmax(logits / temperature), what the filters keep.

    A seen token's logit z becomes z / penalty where positive and z * penalty otherwise. top_k keeps the k most likely,
    of equals those of lower id; top_p the fewest most likely ones of sum >= top_p; min_p those of p >= min_p * max p.
    What is kept is renormalised. Temperature 0 puts all on the most likely token.

    Shape: logits [..., V] and seen [..., V] bool to [..., V], float64 (float32 on MPS, which has no other).

    Reference: Fan et al., 2018, arXiv:1805.04833 (top-k); Holtzman et al., 2019, arXiv:1904.09751 (top-p); Nguyen et
    al., 2024, arXiv:2407.01082 (min-p); Keskar et al., 2019, arXiv:1909.05858 (penalty).
    """
    scores = _penalised(logits.to(wide_dtype(logits.device)), config, seen)
    if config.temperature == 0:
        likeliest = scores.argmax(-1, keepdim=True)
        return torch.zeros_like(scores).scatter_(-1, likeliest, 1.0)
    # The maximum first: a small temperature would send the quotient beyond the largest number.
    scores = (scores - scores.amax(-1, keepdim=True)) / config.temperature
    probs = scores.softmax(-1)
    if config.top_k is not None or config.top_p < 1.0:
        probs = _ranked(probs, config)
    if config.min_p > 0:
        probs = torch.where(probs >= config.min_p * probs.amax(-1, keepdim=True), probs, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def next_token(logits: Tensor, config: GenerateConfig, seen: Tensor | None, uniform: Tensor) -> Tensor:
    """Return the token that `draw` samples from `distribution`; at temperature 0 the most likely token.

    Temperature 0 ignores `uniform` and skips passes over probabilities of which all but one are 0.


    Shape: logits [..., V], seen [..., V] bool and uniform [...] to [...] int64.
    """
    if config.temperature > 0:
        return draw(distribution(logits, config, seen), uniform)
    if seen is None or config.repetition_penalty == 1.0:
        return logits.argmax(-1)
    return _penalised(logits.to(wide_dtype(logits.device)), config, seen).argmax(-1)


def chosen_tokens(
    logits: Tensor, config: GenerateConfig, seen: Tensor | None, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `next_token` of every row and log softmax(logits) there in float32, in as few passes as there are.

    Shape: logits [N, V], seen [N, V] bool and uniform [N] to int64 [N] and float32 [N].
    """
    if config.temperature == 0 and seen is None:
        chosen, logprob = argmax_logprob(logits)
        return chosen, logprob.float()
    has_filters = config.top_k is not None or config.top_p < 1 or config.min_p > 0
    if config.temperature > 0 and seen is None and not has_filters and has_kernel("sample", logits):
        return sample(logits, torch.full_like(uniform, config.temperature), uniform)
    chosen = next_token(logits, config, seen, uniform)
    return chosen, logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def _penalised(scores: Tensor, config: GenerateConfig, seen: Tensor | None) -> Tensor:
    """Make seen tokens less likely."""
    penalty = config.repetition_penalty
    if seen is None or penalty == 1.0:
        return scores
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def _ranked(probs: Tensor, config: GenerateConfig) -> Tensor:
    """Zero what top_k and top_p leave out."""
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    if config.top_k is not None and config.top_k < probs.shape[-1]:
        place = torch.arange(probs.shape[-1], device=probs.device)
        ranked = torch.where(place < config.top_k, ranked, 0.0)
        ranked = ranked / ranked.sum(-1, keepdim=True)
    if config.top_p < 1.0:
        ranked = torch.where(ranked.cumsum(-1) - ranked < config.top_p, ranked, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, ranked)


def uniforms(seed: int, n: int) -> Tensor:
    """Return the n numbers in [0, 1) of a row's seed, float64 on the CPU, whatever device it runs on."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
