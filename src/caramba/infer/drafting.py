"""What proposes tokens for a verification, how many, and whether it is worth it at all."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from caramba.cache import Context, DeviceContext
from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.infer.ragged import Network, device_of, forward_ragged, rewind, right_pad
from caramba.infer.step import distribution, next_token
from caramba.ops.sample import draw
from caramba.runtime.device import wide_dtype

Drafts = tuple[list[list[int]], Tensor | None]


class LookupDrafter:
    """Proposes what followed the last time that a row's last tokens stood in it, of the longest such run.

    Reference: Saxena, 2023, prompt lookup decoding.
    """

    def __init__(self, max_ngram: int, n_rows: int = 1) -> None:
        self.rows = [_RowLookup(max_ngram) for _ in range(n_rows)]

    def propose(self, texts: Sequence[Sequence[int]], counts: Sequence[int], seen: Tensor | None = None) -> Drafts:
        return [row.propose(text, n) if n else [] for row, text, n in zip(self.rows, texts, counts, strict=True)], None


class _RowLookup:
    """The runs of one text."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self._after: dict[tuple[int, ...], int] = {}  # a run of tokens to where its continuation begins
        self._indexed = 0

    def propose(self, ids: Sequence[int], n: int) -> list[int]:
        for end in range(max(self._indexed, 1), len(ids)):
            for size in range(1, min(self.max_ngram, end) + 1):
                self._after[tuple(ids[end - size : end])] = end
        self._indexed = len(ids)
        for size in range(min(self.max_ngram, len(ids)), 0, -1):
            start = self._after.get(tuple(ids[len(ids) - size :]))
            if start is not None:
                period = len(ids) - start  # a continuation that reaches the end repeats itself
                return [ids[start + offset % period] for offset in range(n)]
        return []


class ModelDrafter:
    """Draws from a smaller network of the same vocabulary, with the sampling of the target.

    Row b's draws come from `generators[b]`, as many as it drafts, so a row's drafts do not depend on other rows.
    The context holds the rows' prompts when it comes here. One that is `shared` with the target holds all but the
    last token of each text whenever drafts are asked for; one of its own is brought up to date.
    """

    def __init__(
        self,
        network: Network,
        ctx: Context | DeviceContext,
        config: GenerateConfig,
        generators: Sequence[torch.Generator],
        *,
        held: Sequence[int],
        shared_with: Context | None = None,
        is_shared: bool = False,
    ) -> None:
        self.network, self.ctx, self.config, self.generators = network, ctx, config, generators
        self.is_shared, self.shared_with = is_shared, shared_with
        self._kept = list(held)  # of each text, the first tokens that the cache holds
        self._drafted: list[list[int]] = [[] for _ in held]  # and what it holds behind them

    def propose(self, texts: Sequence[Sequence[int]], counts: Sequence[int], seen: Tensor | None) -> Drafts:
        n = max(counts)
        device = device_of(self.network)
        known = None if seen is None else seen.clone()
        uniform = torch.zeros(len(texts), n, dtype=torch.float64)
        for row, count in enumerate(counts):
            if count:
                uniform[row, :count] = torch.rand(count, generator=self.generators[row], dtype=torch.float64)
        uniform = uniform.to(device, wide_dtype(device))
        hidden = self._catch_up(texts, counts)
        is_greedy = self.config.temperature == 0  # the likeliest tokens are certain drafts
        tokens: list[Tensor] = []
        found: list[Tensor] = []
        for step in range(n):
            logits = self.network.logits(hidden)
            if is_greedy:
                token = next_token(logits, self.config, known, uniform[:, step])[:, None]
            else:
                found.append(distribution(logits, self.config, known))
                token = draw(found[-1], uniform[:, step].to(found[-1]))[:, None]
            if known is not None:
                known.scatter_(1, token, True)
            tokens.append(token)
            if step + 1 < n:
                hidden = forward_ragged(self.network, token, self.ctx)[:, -1]
        drawn = torch.cat(tokens, dim=1)
        drafts = [row[:count] for row, count in zip(drawn.tolist(), counts, strict=True)]
        for row, draft in enumerate(drafts):
            if draft:
                self._kept[row], self._drafted[row] = len(texts[row]), draft[:-1]
        if is_greedy:
            return drafts, None
        own = torch.tensor(counts, device=device)[:, None] > torch.arange(n, device=device)
        return drafts, torch.stack(found, dim=1) * own[..., None]

    def _catch_up(self, texts: Sequence[Sequence[int]], counts: Sequence[int]) -> Tensor:
        """Feed what the cache lacks of the rows that draft, and return what the head reads after each text, [B, M]."""
        held = [self._held(row, text) for row, text in enumerate(texts)]
        self._kept, self._drafted = held, [[] for _ in held]
        width = max(len(text) - n for text, n, count in zip(texts, held, counts, strict=True) if count)
        # All rows take as many tokens: those that lack fewer take some again, or fill up.
        starts = [max(0, len(text) - width) for text in texts]
        rows = [text[start:] for text, start in zip(texts, starts, strict=True)]
        if self.shared_with is not None:
            self.ctx.position = self.shared_with.position  # pyright: ignore[reportAttributeAccessIssue]
        rewind(self.ctx, starts)
        fed = right_pad(rows, width, [text[-1] for text in texts], device_of(self.network))
        hidden = forward_ragged(self.network, fed, self.ctx)
        last = torch.tensor([len(row) - 1 for row in rows], device=hidden.device)
        rewind(self.ctx, [len(text) for text in texts])
        return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]

    def _held(self, row: int, text: Sequence[int]) -> int:
        """Return how many tokens of a text the cache holds, at most all but the last: rejected drafts are none."""
        if self.is_shared:
            return len(text) - 1
        kept, n = self._kept[row], 0
        for mine, theirs in zip(self._drafted[row], text[kept:], strict=False):
            if mine != theirs:
                break
            n += 1
        return min(kept + n, len(text) - 1)


Drafter = LookupDrafter | ModelDrafter
"""Proposes the next tokens of rows.

`propose(texts, counts, seen)` returns up to counts[b] tokens after text b, and the distributions that they were sampled
from, [B, max(counts), V], zero after a row's last draft, and None if drafts are certain. `seen` is as in
`distribution`, [B, V].
"""


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
        # Drafts after a rejected token were not verified.
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
