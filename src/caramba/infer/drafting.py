"""What proposes tokens for a verification, how many, and whether it is worth it at all."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from caramba.cache import Context
from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.infer.sampling import distribution, draw
from caramba.model import Model


class Drafter(Protocol):
    """Proposes the next tokens of one row."""

    def propose(self, ids: Sequence[int], n: int) -> tuple[list[int], Tensor | None]:
        """Return up to n tokens after `ids`, and the distributions [n, V] that they were drawn from; None where they
        are certain."""
        ...


class LookupDrafter:
    """Proposes what followed the last time that the row's last tokens stood in it, of the longest such run.

    Reference: Saxena, 2023, prompt lookup decoding.
    """

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self._after: dict[tuple[int, ...], int] = {}  # a run of tokens to where its continuation begins
        self._indexed = 0

    def propose(self, ids: Sequence[int], n: int) -> tuple[list[int], Tensor | None]:
        for end in range(max(self._indexed, 1), len(ids)):
            for size in range(1, min(self.max_ngram, end) + 1):
                self._after[tuple(ids[end - size : end])] = end
        self._indexed = len(ids)
        for size in range(min(self.max_ngram, len(ids)), 0, -1):
            start = self._after.get(tuple(ids[len(ids) - size :]))
            if start is not None:
                whole = list(ids)
                for offset in range(n):  # a continuation that reaches the end repeats itself
                    whole.append(whole[start + offset])
                return whole[len(ids) :], None
        return [], None


class ModelDrafter:
    """Draws from a smaller model of the same vocabulary, with the sampling of the target."""

    def __init__(
        self, model: Model, ctx: Context, config: GenerateConfig, generator: torch.Generator
    ) -> None:
        self.model, self.ctx, self.config, self.generator = model, ctx, config, generator
        self._held: list[int] = []  # the tokens that the cache holds

    def propose(self, ids: Sequence[int], n: int) -> tuple[list[int], Tensor | None]:
        self._roll_back(ids)
        device = self.model.embedder.token.weight.device
        known = self._mask(ids, device)
        tokens: list[int] = []
        found: list[Tensor] = []
        while len(tokens) < n:
            fed = [*ids, *tokens][len(self._held) :]
            hidden = self.model.hidden(torch.tensor([fed], device=device), self.ctx)
            self._held += fed
            q = distribution(self.model.logits(hidden[0, -1]), self.config, known)
            uniform = torch.rand((), generator=self.generator, dtype=torch.float64)
            token = int(draw(q, uniform.to(q)))
            if known is not None:
                known[token] = True
            tokens.append(token)
            found.append(q)
        return tokens, torch.stack(found) if found else None

    def _roll_back(self, ids: Sequence[int]) -> None:
        """Forget what was drafted and rejected; at least the last of `ids` is fed again."""
        kept = 0
        for mine, theirs in zip(self._held, ids[:-1], strict=False):
            if mine != theirs:
                break
            kept += 1
        self.ctx.truncate(kept)
        del self._held[kept:]

    def _mask(self, ids: Sequence[int], device: torch.device) -> Tensor | None:
        if self.config.repetition_penalty == 1.0:
            return None
        seen = torch.zeros(self.model.spec.embedder.vocab_size, dtype=torch.bool, device=device)
        seen[torch.tensor(list(ids), device=device)] = True
        return seen


class DraftLength:
    """How many tokens to draft next: adapts to what was accepted, and stops where drafting does not pay."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self.config = config
        self.fallbacks = 0
        self._k = config.spec_k
        self._wait = 0
        self._is_trial = False
        self._recent: deque[bool] = deque(maxlen=config.window)

    def next(self, most: int) -> int:
        """Return the number to draft, at most `most`."""
        return 0 if self._wait > 0 else min(self._k, most)

    def update(self, drafted: int, accepted: int, new_tokens: int) -> None:
        """Learn how a round went."""
        config = self.config
        if self._wait > 0:
            self._wait -= new_tokens
            return
        if drafted == 0:
            return
        if config.spec_k_adaptive:
            self._k = min(2 * self._k, config.spec_k) if accepted == drafted else max(1, self._k - 1)
        # What stands behind a rejected token was never judged.
        self._recent.extend([True] * accepted + [False] * (accepted < drafted))
        if len(self._recent) < config.window:
            return
        floor = config.spec_disable_below_accept + (config.hysteresis if self._is_trial else 0.0)
        if sum(self._recent) < floor * len(self._recent):
            self.fallbacks += 1
            self._wait, self._is_trial, self._k = config.retry_after, True, config.spec_k
            self._recent.clear()
        else:
            self._is_trial = False
