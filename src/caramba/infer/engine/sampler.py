"""The draw of all slots at once, each by the settings of its own request."""

import copy

import torch
from torch import Tensor

from caramba.config.generate import GenerateConfig
from caramba.infer.engine.upload import upload
from caramba.infer.step import uniforms
from caramba.ops.sample import argmax_logprob, draw, sample
from caramba.runtime.device import wide_dtype

Form = tuple[bool, bool, bool, bool]
N_SETTINGS = 6
"""Columns of a slot's row before its random numbers: temperature, top_k, top_p, min_p, penalty, random numbers."""


class SlotSampler:
    """Settings, random numbers and sampled tokens of every slot, in tensors of fixed addresses.

    `choose` gives each row exactly what `draw(distribution(...))` gives for its request's own config, whatever the
    other rows ask for.
    """

    def __init__(self, n_slots: int, max_new_tokens: int, vocab_size: int, device: torch.device) -> None:
        wide = wide_dtype(device)
        self.vocab_size = vocab_size
        # All that a request brings is one row, which one copy fills.
        self._rows = torch.zeros(n_slots, N_SETTINGS + max_new_tokens, dtype=wide, device=device)
        self._rows[:, :N_SETTINGS] = torch.tensor(self._settings(GenerateConfig(temperature=0)), dtype=wide)
        columns = self._rows[:, : N_SETTINGS - 1].split(1, dim=1)
        self.temperature, self.top_k, self.top_p, self.min_p, self.penalty = columns
        # Counted as the integers that the same bits are: both zeros are alike.
        counts = self._rows.view(torch.int64 if wide == torch.float64 else torch.int32)
        self.drawn, self.uniform = counts[:, N_SETTINGS - 1], self._rows[:, N_SETTINGS:]
        # Tokens and, as integers, the bits of their log-probabilities: one copy brings both to the host.
        self._both = torch.zeros(2, n_slots, dtype=torch.int64, device=device)
        self.token = self._both[0]
        self.seen: Tensor | None = None
        self._is_cuda = device.type == "cuda"
        self._host = torch.zeros(2, n_slots, dtype=torch.int64, pin_memory=self._is_cuda)
        self._sent = torch.cuda.Event() if self._is_cuda else None
        # The forward of the sampled tokens does not wait for the copy to the host.
        self._copies = torch.cuda.Stream(device) if self._is_cuda else None
        self._configs: list[GenerateConfig | None] = [None] * n_slots

    @property
    def form(self) -> Form:
        """Whether any slot samples, ranks its tokens, drops unlikely ones, and has a penalty: what a draw has
        to compute."""
        configs = [config for config in self._configs if config is not None]
        return (
            any(config.temperature > 0 for config in configs),
            any(config.temperature > 0 and (config.top_k is not None or config.top_p < 1) for config in configs),
            any(config.temperature > 0 and config.min_p > 0 for config in configs),
            any(config.repetition_penalty != 1.0 for config in configs),
        )

    def admit(self, slot: int, prompt: list[int], seed: int, config: GenerateConfig) -> None:
        """Take a request's settings and random numbers, without a wait for the device."""
        self._configs[slot] = config
        n_all = N_SETTINGS + config.max_new_tokens
        row = torch.empty(n_all, dtype=self._rows.dtype, pin_memory=self._is_cuda)
        row[:N_SETTINGS] = torch.tensor(self._settings(config), dtype=row.dtype)
        row[N_SETTINGS:] = uniforms(seed, config.max_new_tokens)
        self._rows[slot, :n_all].copy_(row, non_blocking=self._is_cuda)
        if config.repetition_penalty != 1.0 and self.seen is None:
            self.seen = torch.zeros(len(self.token), self.vocab_size, dtype=torch.bool, device=self.token.device)
        if self.seen is not None:
            self.seen[slot].zero_().index_fill_(0, upload(prompt, self.seen.device), True)

    def _settings(self, config: GenerateConfig) -> tuple[float, ...]:
        return (
            config.temperature,
            min(config.top_k or self.vocab_size, self.vocab_size),
            # A sum of probabilities may round to 1 before the last token: without top_p nothing is left out.
            config.top_p if config.top_p < 1 else torch.inf,
            config.min_p,
            config.repetition_penalty,
            0.0,
        )

    def send(self) -> None:
        """Start the copy of sampled tokens to the host; the device continues."""
        if self._copies is None or self._sent is None:
            self._host.copy_(self._both)
            return
        # What it reads is overwritten by the next draw, which is launched once the copy has been waited for.
        self._copies.wait_stream(torch.cuda.current_stream(self._both.device))
        with torch.cuda.stream(self._copies):
            self._host.copy_(self._both, non_blocking=True)
            self._sent.record(self._copies)

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for what was sent: every slot's token and log-probability."""
        if self._sent is not None:
            self._sent.synchronize()
        tokens, bits = self._host
        return tokens.tolist(), bits.to(torch.int32).view(torch.float32).tolist()

    def trial(self) -> "SlotSampler":
        """Return a sampler of the same content whose draws count for nothing."""
        other = copy.copy(self)
        other._both, other.drawn = self._both.clone(), self.drawn.clone()
        other.token = other._both[0]
        other.seen = None if self.seen is None else self.seen.clone()
        return other

    def release(self, slot: int) -> None:
        """Clear a request's settings: the device may still sample with them, and the token is discarded."""
        self._configs[slot] = None

    def choose(self, logits: Tensor, form: Form) -> Tensor:
        """Sample every slot's token into `token`, store its log-probability, and count it.

        Shape: logits [B, V] to [B].
        """
        samples, ranks, drops, penalises = form
        if not samples and not penalises:
            token, logprob = argmax_logprob(logits)
            return self._keep(token, logprob)
        if not (ranks or drops or penalises):
            return self._keep(*sample(logits, self.temperature[:, 0], self._uniform()))
        scores = logits.to(self.temperature.dtype) if samples or penalises else logits
        if penalises and self.seen is not None:
            penalty = self.penalty
            scores = torch.where(self.seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores)
        chosen = scores.argmax(-1)
        if samples:
            is_greedy = self.temperature == 0
            sampled = draw(self._probabilities(scores, is_greedy, ranks), self._uniform())
            chosen = torch.where(is_greedy[:, 0], chosen, sampled)
        if penalises and self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        return self._keep(chosen, logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0])

    def _uniform(self) -> Tensor:
        at = self.drawn.clamp(max=self.uniform.shape[1] - 1).long()[:, None]
        return self.uniform.gather(1, at)[:, 0]

    def _keep(self, chosen: Tensor, logprob: Tensor) -> Tensor:
        self._both[1].copy_(logprob.float().view(torch.int32))
        self.token.copy_(chosen)
        self.drawn += 1
        return self.token

    def _probabilities(self, scores: Tensor, is_greedy: Tensor, ranks: bool) -> Tensor:
        """Return what `distribution` does, in its order of operations, by each row's own settings."""
        temperature = torch.where(is_greedy, 1.0, self.temperature)
        probs = ((scores - scores.amax(-1, keepdim=True)) / temperature).softmax(-1)
        if ranks:
            ranked, order = probs.sort(dim=-1, descending=True, stable=True)
            place = torch.arange(probs.shape[-1], device=probs.device)
            kept = torch.where(place < self.top_k, ranked, 0.0)
            ranked = torch.where(self.top_k < self.vocab_size, kept / kept.sum(-1, keepdim=True), ranked)
            ranked = torch.where(ranked.cumsum(-1) - ranked < self.top_p, ranked, 0.0)
            probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        probs = torch.where(probs >= self.min_p * probs.amax(-1, keepdim=True), probs, 0.0)
        return probs / probs.sum(-1, keepdim=True)
