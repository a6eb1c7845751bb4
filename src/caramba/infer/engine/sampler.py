"""The draw of all slots at once, each by the settings of its own request."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from caramba.config.generate import GenerateConfig
from caramba.infer.sampling import uniforms, wide_dtype
from caramba.ops import draw, drawn, likeliest

Form = tuple[bool, bool, bool, bool]


class SlotSampler:
    """Settings, random numbers and drawn tokens of every slot, in tensors of fixed addresses.

    `choose` gives each row exactly what `draw(distribution(...))` gives for its request's own config, whatever the
    other rows ask for.
    """

    def __init__(self, n_slots: int, max_new_tokens: int, vocab_size: int, device: torch.device) -> None:
        wide = wide_dtype(device)

        def column(value: float) -> Tensor:
            return torch.full((n_slots, 1), value, dtype=wide, device=device)

        self.vocab_size = vocab_size
        self.temperature, self.top_p, self.min_p = column(0.0), column(torch.inf), column(0.0)
        self.penalty = column(1.0)
        self.top_k = torch.full((n_slots, 1), vocab_size, dtype=torch.int64, device=device)
        self.uniform = torch.zeros(n_slots, max_new_tokens, dtype=wide, device=device)
        self.drawn = torch.zeros(n_slots, dtype=torch.int64, device=device)
        self.logprob = torch.zeros(n_slots, dtype=torch.float32, device=device)
        self.token = torch.zeros(n_slots, dtype=torch.int64, device=device)
        self.seen: Tensor | None = None
        is_cuda = device.type == "cuda"
        self._host = torch.zeros(2, n_slots, dtype=torch.int64, pin_memory=is_cuda)
        self._sent = torch.cuda.Event() if is_cuda else None
        self._configs: list[GenerateConfig | None] = [None] * n_slots

    @property
    def form(self) -> Form:
        """Whether any slot samples, ranks its tokens, drops unlikely ones, and has a penalty: what a draw has
        to compute."""
        configs = [config for config in self._configs if config is not None]
        return (
            any(config.temperature > 0 for config in configs),
            any(
                config.temperature > 0 and (config.top_k is not None or config.top_p < 1)
                for config in configs
            ),
            any(config.temperature > 0 and config.min_p > 0 for config in configs),
            any(config.repetition_penalty != 1.0 for config in configs),
        )

    def admit(self, slot: int, prompt: list[int], seed: int, config: GenerateConfig) -> None:
        """Take a request's settings and random numbers."""
        self._configs[slot] = config
        self.temperature[slot] = config.temperature
        self.top_k[slot] = min(config.top_k or self.vocab_size, self.vocab_size)
        # A sum of probabilities may round to 1 before the last token: without top_p nothing is left out.
        self.top_p[slot] = config.top_p if config.top_p < 1 else torch.inf
        self.min_p[slot], self.penalty[slot] = config.min_p, config.repetition_penalty
        self.drawn[slot] = 0
        self.uniform[slot, : config.max_new_tokens] = uniforms(seed, config.max_new_tokens).to(
            self.uniform, non_blocking=True
        )
        if config.repetition_penalty != 1.0 and self.seen is None:
            self.seen = torch.zeros(
                len(self.token), self.vocab_size, dtype=torch.bool, device=self.token.device
            )
        if self.seen is not None:
            self.seen[slot] = False
            self.seen[slot, torch.tensor(prompt).to(self.seen.device, non_blocking=True)] = True

    def send(self) -> None:
        """Start bringing what was drawn to the host, while the device goes on."""
        both = torch.stack((self.token, self.logprob.view(torch.int32).long()))
        self._host.copy_(both, non_blocking=self._sent is not None)
        if self._sent is not None:
            self._sent.record(torch.cuda.current_stream(self.token.device))

    def read(self) -> tuple[list[int], list[float]]:
        """Wait for what was sent: every slot's token and log-probability."""
        if self._sent is not None:
            self._sent.synchronize()
        tokens, bits = self._host
        return tokens.tolist(), bits.to(torch.int32).view(torch.float32).tolist()

    def trial(self) -> SlotSampler:
        """Return a sampler of the same content whose draws count for nothing."""
        other = copy.copy(self)
        other.token, other.logprob, other.drawn = self.token.clone(), self.logprob.clone(), self.drawn.clone()
        other.seen = None if self.seen is None else self.seen.clone()
        return other

    def leave(self, slot: int) -> None:
        """Forget a request's settings."""
        self._configs[slot] = None
        self.temperature[slot], self.penalty[slot] = 0.0, 1.0

    def choose(self, logits: Tensor, form: Form) -> Tensor:
        """Draw every slot's token into `token`, its log-probability into `logprob`, and count it.

        Shape: logits [B, V] to [B].
        """
        samples, ranks, drops, penalises = form
        if not samples and not penalises:
            token, logprob = likeliest(logits)
            return self._keep(token, logprob)
        if not (ranks or drops or penalises):
            return self._keep(*drawn(logits, self.temperature[:, 0], self._uniform()))
        scores = logits.to(self.temperature.dtype) if samples or penalises else logits
        if penalises and self.seen is not None:
            penalty = self.penalty
            scores = torch.where(
                self.seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores
            )
        chosen = scores.argmax(-1)
        if samples:
            is_greedy = self.temperature == 0
            sampled = draw(self._probabilities(scores, is_greedy, ranks), self._uniform())
            chosen = torch.where(is_greedy[:, 0], chosen, sampled)
        if penalises and self.seen is not None:
            self.seen.scatter_(1, chosen[:, None], True)
        return self._keep(chosen, logits.float().log_softmax(-1).gather(1, chosen[:, None])[:, 0])

    def _uniform(self) -> Tensor:
        """Return the random number of every slot's next draw."""
        at = self.drawn.clamp(max=self.uniform.shape[1] - 1)[:, None]
        return self.uniform.gather(1, at)[:, 0]

    def _keep(self, chosen: Tensor, logprob: Tensor) -> Tensor:
        self.logprob.copy_(logprob)
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
