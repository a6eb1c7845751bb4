"""One step's sampling for all rows: the exact distribution of the next token, and the draw from it on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.config.generate import GenerateConfig
from caramba.infer.row import GenerationRow, OnText
from caramba.ops import has_kernel
from caramba.ops.sample import argmax_logprob, draw, sample, store_sample
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
    penalty = config.repetition_penalty
    if seen is None or penalty == 1.0:
        return scores
    return torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)


def _ranked(probs: Tensor, config: GenerateConfig) -> Tensor:
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


def pad_prompts(texts: Sequence[Sequence[int]]) -> Tensor:
    """Return texts of any lengths as one tensor on the host, filled up with zeros. Shape: int64 [B, longest]."""
    tokens = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text, dtype=torch.int64)
    return tokens


def seen_in(texts: Sequence[list[int]], vocab_size: int) -> Tensor:
    """Return which entries of the vocabulary each text holds, on the host. Shape: bool [B, V]."""
    seen = torch.zeros(len(texts), vocab_size, dtype=torch.bool)
    for row, text in enumerate(texts):
        seen[row, text] = True
    return seen


@dataclass
class StepState:
    """What a step reads and writes on the device: tensors of fixed shapes, so that it can be compiled and captured.

    Row b has sampled `step - delay[b]` tokens; while that is below 0 it is still fed its own prompt. `is_level` tells
    the host that no row waits: a draw then takes a third of the kernels, and what is captured is another graph.
    """

    prompts: Tensor  # [B, longest] int64
    delay: Tensor  # [B] int64
    uniform: Tensor  # [B, max_new_tokens] float64
    tokens: Tensor  # [B, max_new_tokens] int64
    logprobs: Tensor  # [B, max_new_tokens] float32
    seen: Tensor | None  # [B, V] bool
    step: Tensor  # [] int64
    start: Tensor  # [] int64
    is_level: bool = True

    @classmethod
    def of(
        cls,
        rows: Sequence[GenerationRow],
        config: GenerateConfig,
        vocab_size: int,
        device: torch.device,
        width: int = 0,
    ) -> StepState:
        """Return the state before the first step, with room for prompts of `width` tokens or of the longest row's."""
        width, n_new = max(width, *(len(row.prompt) for row in rows)), config.max_new_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        n_rows, has_penalty = len(rows), config.repetition_penalty != 1.0
        state = cls(
            prompts=zeros(n_rows, width),
            delay=zeros(n_rows),
            uniform=zeros(n_rows, n_new, dtype=wide_dtype(device)),
            tokens=zeros(n_rows, n_new),
            logprobs=zeros(n_rows, n_new, dtype=torch.float32),
            seen=zeros(n_rows, vocab_size, dtype=torch.bool) if has_penalty else None,
            step=zeros(),
            start=zeros(),
        )
        state.refill(rows)
        return state

    def refill(self, rows: Sequence[GenerationRow]) -> None:
        """Begin again with as many other rows, in the same memory: what was captured on it stays of use."""
        lengths = [len(row.prompt) for row in rows]
        prompts = pad_prompts([row.prompt for row in rows])
        self.prompts[:, : prompts.shape[1]].copy_(prompts)
        self.delay.copy_(torch.tensor(lengths) - min(lengths))
        self.uniform.copy_(torch.stack([uniforms(row.seed, self.uniform.shape[1]) for row in rows]))
        for counted in (self.tokens, self.logprobs, self.step):
            counted.zero_()
        self.start.fill_(min(lengths))
        self.is_level = min(lengths) == max(lengths)
        if self.seen is not None:
            self.seen.copy_(seen_in([row.prompt for row in rows], self.seen.shape[1]))

    def choose(self, logits: Tensor, config: GenerateConfig, fed: Tensor | None = None) -> Tensor:
        """Draw every row's token, record it, and return what is fed next, without a wait for the device: in `fed`, if
        that is given.

        Shape: logits [B, V] and fed [B] to [B].
        """
        found = self._choose(logits, config, fed)
        return found if fed is None or found is fed else fed.copy_(found)

    def _choose(self, logits: Tensor, config: GenerateConfig, fed: Tensor | None) -> Tensor:
        last = self.tokens.shape[1] - 1
        if self.is_level:  # no row waits for another, so every draw counts
            return self._choose_level(logits, config, last, fed)
        own = self.step - self.delay
        slot = own.clamp(0, last)[:, None]
        chosen, logprob = self._next(logits, config, slot)
        counts = ((own >= 0) & (own <= last))[:, None]
        self.tokens.scatter_(1, slot, torch.where(counts, chosen, self.tokens.gather(1, slot)))
        self.logprobs.scatter_(1, slot, torch.where(counts, logprob, self.logprobs.gather(1, slot)))
        at = (self.start + self.step).clamp(max=self.prompts.shape[1] - 1).expand(len(own))[:, None]
        fed = torch.where((own < 0)[:, None], self.prompts.gather(1, at), chosen)
        if self.seen is not None:
            self.seen.scatter_(1, fed, True)
        self.step += 1
        return fed[:, 0]

    def _choose_level(self, logits: Tensor, config: GenerateConfig, last: int, fed: Tensor | None) -> Tensor:
        has_keeper = self.seen is None and has_kernel("store_sample", logits)
        # The kernel finds the position itself, and no token of temperature 0 depends on it.
        is_free = has_keeper and config.temperature == 0
        slot = (self.step if is_free else self.step.clamp(max=last)).view(1)
        chosen, logprob = self._next(logits, config, slot.expand(len(self.delay), 1))
        if has_keeper:
            fed = torch.empty_like(self.delay) if fed is None else fed
            store_sample(chosen[:, 0], logprob[:, 0], self.step, self.tokens, self.logprobs, fed)
            return fed
        self.tokens.index_copy_(1, slot, chosen)
        self.logprobs.index_copy_(1, slot, logprob)
        if self.seen is not None:
            self.seen.scatter_(1, chosen, True)
        self.step += 1
        return chosen.squeeze(1)

    def _next(self, logits: Tensor, config: GenerateConfig, slot: Tensor) -> tuple[Tensor, Tensor]:
        """Return every row's token and its log-probability, [B, 1] each, of the draw `slot` [B, 1] of each row."""
        uniform = self.uniform if config.temperature == 0 else self.uniform.gather(1, slot)
        chosen, logprob = chosen_tokens(logits, config, self.seen, uniform[:, 0])
        return chosen.unsqueeze(1), logprob.unsqueeze(1)

    def read(self, rows: Sequence[GenerationRow], position: int, on_text: OnText | None) -> bool:
        """Give every row its tokens before `position`, the one wait of these steps; return whether all ended."""
        live = [row for row in rows if row.finish is None]
        low = min(len(row.tokens) for row in live)
        high = min(max(position - len(row.prompt) for row in live), self.tokens.shape[1])
        tokens, logprobs = self.tokens[:, low:high].tolist(), self.logprobs[:, low:high].tolist()
        for index, row in enumerate(rows):
            first, end = len(row.tokens) - low, position - len(row.prompt) - low
            if row.finish is None and end > first:
                row.take(tokens[index][first:end], logprobs[index][first:end], on_text)
        return all(row.finish is not None for row in rows)
