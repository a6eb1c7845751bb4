"""Verification of drafts: rounds of some rows, and the forwards that run by themselves on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.cache import Context, DeviceContext
from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.infer.device_steps import Captured, capture_graph, compile_logits, form_of, replay_graph
from caramba.infer.drafting import Drafter, DraftLength
from caramba.infer.generator import GenerateStats
from caramba.infer.ragged import forward_ragged, rewind, right_pad
from caramba.infer.row import GenerationRow, OnText
from caramba.infer.step import distribution, next_token, seen_in, uniforms
from caramba.model import Model
from caramba.ops.dba_decode import MAX_QUERIES
from caramba.ops.sample import draw
from caramba.runtime.device import wide_dtype

WIDTHS = (1, 2, 4, MAX_QUERIES)
"""Tokens per row that a forward takes: fewer are filled up, so that a few graphs serve every number of drafts."""


class VerifyForwards:
    """Forwards over rows of a model at positions of their own, with the logits after every token.

    Host and device both count the rows' lengths; each width's forward is one graph on the device. Padding tokens follow
    a row's own: nothing attends to them, and `rewind`, which must follow every call, discards them. `captures` counts
    graphs.
    """

    def __init__(self, model: Model, ctx: DeviceContext, *, is_compiled: bool, is_captured: bool) -> None:
        self.model, self.ctx = model, ctx
        self.is_compiled, self.is_captured = is_compiled, is_captured
        self.captures = 0
        self._graphs: dict[int, Captured] = {}
        if is_compiled:
            for buffer in (one for cache in ctx.ctx.caches for one in cache.memory):
                torch._dynamo.maybe_mark_dynamic(buffer, 2)  # one graph serves every length bucket

    def __call__(self, tokens: Tensor) -> Tensor:
        """Run the next tokens of every row behind its own. Shape: [B, T] int64 to [B, T, V].

        Raises:
            CacheFull: a row has no place for them.
        """
        parts = [self._part(part) for part in tokens.split(MAX_QUERIES, dim=1)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _part(self, tokens: Tensor) -> Tensor:
        n_tokens = tokens.shape[1]
        width = next(width for width in WIDTHS if width >= n_tokens)
        filled = tokens[:, -1:].expand(-1, width - n_tokens)
        logits = self._forward(torch.cat((tokens, filled), dim=1), width)[:, :n_tokens]
        # A replay of the next part overwrites what this one left.
        return logits.clone() if self.is_captured else logits

    def _forward(self, tokens: Tensor, width: int) -> Tensor:
        ctx = self.ctx
        ctx.width = width
        with ctx.host_counted_forward():
            if self.is_captured and width not in self._graphs:
                start = ctx.device_lengths.clone()

                def trial(given: Tensor) -> Tensor:
                    ctx.device_lengths.copy_(start)  # at the same places each time
                    return self.logits(given)

                self.captures += 1
                self._graphs[width] = capture_graph(tokens, self.logits, trial)
                ctx.device_lengths.copy_(start)
            if self.is_captured:
                return replay_graph(self._graphs[width], tokens)
            return self.logits(tokens)

    def logits(self, tokens: Tensor) -> Tensor:
        """Run one forward as a function of tensors alone, at the context's width. Shape: [B, T] to [B, T, V]."""
        if not self.is_compiled:
            return row_logits(self.model, tokens, self.ctx)
        form = form_of(self.model, self.ctx.ctx)
        return compile_logits(self.model, tokens.shape[0], *form, tokens.shape[1], run=row_logits)(
            self.model, tokens, self.ctx
        )


def row_logits(model: Model, tokens: Tensor, ctx: DeviceContext) -> Tensor:
    """Return the logits after every token. Shape: [B, T] int64 to [B, T, V]."""
    return model.logits(model.hidden(tokens, ctx))


@dataclass
class SpeculativeStats(GenerateStats):
    """How speculation went, all rows together.

    Attributes:
        steps: forwards of the model after prefill.
        row_steps: rows that these were for, each until it ended.
        step_tokens: tokens that they gave, end marks too; the first of each row comes of its prompt.
        most_rows: rows that ran together at most.
        judged: drafts up to the first of a round that was rejected.
        not_batched: why rows ran one after another, if they did.
    """

    row_steps: int = 0
    step_tokens: int = 0
    most_rows: int = 0
    drafted: int = 0
    accepted: int = 0
    judged: int = 0
    fallbacks: int = 0
    not_batched: str | None = None

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a row per forward for it: the speed-up if drafting and verifying cost no more than a step."""
        return self.step_tokens / self.row_steps if self.row_steps else 0.0


def verify_drafts(
    target: Tensor, proposed: Tensor, drafts: Tensor, accept: Tensor, redraw: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many drafts are accepted, and the token that follows them.

    Draft d_i is accepted with probability min(1, p_i(d_i) / q_i(d_i)). The first that is not is replaced by a draw from
    max(p_i - q_i, 0), normalised; if all are, one more token is sampled from p_{k+1}. Tokens are then distributed as
    if sampled from p one by one, whatever q is. If q_i is all zero there was no draft: the next token is from
    p_i.

    Shape: target p [..., k + 1, V], proposed q [..., k, V], drafts [..., k], accept [..., k] and redraw [...] in
    [0, 1); returns [...] and [...] int64.

    Reference: Leviathan et al., 2022, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    k = drafts.shape[-1]
    p_of = target[..., :k, :].gather(-1, drafts[..., None])[..., 0]
    q_of = proposed.gather(-1, drafts[..., None])[..., 0]
    is_accepted = (accept.to(p_of.dtype) * q_of < p_of) & (q_of > 0)
    n_accepted = is_accepted.long().cumprod(-1).sum(-1)
    # The extra token has no q.
    right_pad = torch.cat((proposed, torch.zeros_like(target[..., :1, :])), dim=-2)
    at = n_accepted[..., None, None].expand(*n_accepted.shape, 1, target.shape[-1])
    p, q = target.gather(-2, at)[..., 0, :], right_pad.gather(-2, at)[..., 0, :]
    rest = (p - q).clamp(min=0)
    # Rounding alone can reject a draft where p and q are equal: nothing is left over, and p is right.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    return n_accepted, draw(rest, redraw)


class Verifier:
    """The rounds of some rows. `texts` are all of their tokens; the cache holds all but the last of each.

    `steps` run its forwards by themselves on the device, on rows at positions of their own.

    A row's numbers come from its own seed: `uniform[b, i]` draws its new token i where no draft has to be judged, and
    its generator, which its drafter shares, gives the others in the order in which its own rounds need them. So a
    row's text does not depend on the other rows. A row that has ended stays in the forwards and in nothing
    else.
    """

    def __init__(
        self,
        model: Model,
        rows: Sequence[GenerationRow],
        ctx: Context | DeviceContext,
        config: GenerateConfig,
        speculation: SpeculativeConfig,
        drafter: Drafter,
        generators: Sequence[torch.Generator],
        stats: SpeculativeStats,
        steps: VerifyForwards | None = None,
    ) -> None:
        self.steps = steps
        self.model, self.rows, self.ctx, self.config = model, rows, ctx, config
        self.speculation, self.drafter, self.generators, self.stats = speculation, drafter, generators, stats
        self.device = model.embedder.token.weight.device
        self.lengths = [DraftLength(speculation) for _ in rows]
        self.uniform = torch.stack([uniforms(row.seed, config.max_new_tokens) for row in rows])
        self.texts = [list(row.prompt) for row in rows]
        self.seen: Tensor | None = None
        if config.repetition_penalty != 1.0:
            vocab_size = model.spec.embedder.vocab_size
            self.seen = seen_in([row.prompt for row in rows], vocab_size).to(self.device)

    @property
    def is_done(self) -> bool:
        """Whether every row has ended."""
        return all(row.finish is not None for row in self.rows)

    def take_first(self, logits: Tensor, on_text: OnText | None) -> None:
        """Draw the token after each prompt. Shape: logits [B, V]."""
        tokens = next_token(logits, self.config, self.seen, self.uniform[:, 0].to(self.device, wide_dtype(self.device)))
        self._take([[token] for token in tokens.tolist()], logits[:, None], on_text)

    def round(self, on_text: OnText | None) -> None:
        """Draft, verify in one forward, and let every row keep what is accepted and one token more."""
        live = [row.finish is None for row in self.rows]
        # The verifying forward adds a token itself, so the last one is never drafted.
        counts = [
            length.next(self.config.max_new_tokens - len(row.tokens) - 1) if is_live else 0
            for row, length, is_live in zip(self.rows, self.lengths, live, strict=True)
        ]
        drafts, q = self._drafts(counts)
        width = 1 + max(map(len, drafts))
        last = [text[-1] for text in self.texts]
        fed = right_pad([[a, *b] for a, b in zip(last, drafts, strict=True)], width, last, self.device)
        logits = self.model.logits(forward_ragged(self.model, fed, self.ctx)) if self.steps is None else self.steps(fed)
        seen = None if self.seen is None else seen_along(self.seen, fed)
        if q is None:
            tokens, accepted = self._equal(logits, seen, drafts)
        else:
            tokens, accepted = self._judged(distribution(logits, self.config, seen), q, fed, drafts)
        for index, (row_tokens, draft) in enumerate(zip(tokens, drafts, strict=True)):
            if not live[index]:
                row_tokens.clear()
                continue
            if accepted[index] == len(draft) > 0 and not self.speculation.spec_extra_token:
                row_tokens.pop()
            self._count(index, len(draft), accepted[index], len(row_tokens))
        self.stats.steps += 1
        self._take(tokens, logits, on_text)
        rewind(self.ctx, [len(text) - 1 for text in self.texts])

    def _drafts(self, counts: Sequence[int]) -> tuple[list[list[int]], Tensor | None]:
        if not any(counts):
            return [[] for _ in counts], None
        return self.drafter.propose(self.texts, counts, self.seen)

    def _equal(
        self, logits: Tensor, seen: Tensor | None, drafts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[int]]:
        """Draw every token as without drafts, and keep each row's up to the first that is not its draft."""
        made = torch.tensor([len(row.tokens) for row in self.rows])[:, None]
        slots = (made + torch.arange(logits.shape[1])).clamp(max=self.uniform.shape[1] - 1)
        tokens: list[list[int]] = []
        accepted: list[int] = []
        uniform = self.uniform.gather(1, slots).to(self.device, wide_dtype(self.device))
        drawn = next_token(logits, self.config, seen, uniform).tolist()
        for row, draft in zip(drawn, drafts, strict=True):
            n = next((i for i, (a, b) in enumerate(zip(draft, row, strict=False)) if a != b), len(draft))
            accepted.append(n)
            tokens.append(row[: n + 1])
        return tokens, accepted

    def _judged(
        self, p: Tensor, q: Tensor, fed: Tensor, drafts: Sequence[Sequence[int]]
    ) -> tuple[list[list[int]], list[int]]:
        """Accept drafts by rejection sampling, and draw the token after them."""
        k = q.shape[1]
        numbers = torch.zeros(len(drafts), k + 1, dtype=torch.float64)
        for index, (draft, row) in enumerate(zip(drafts, self.rows, strict=True)):
            if draft:
                own = torch.rand(len(draft) + 1, generator=self.generators[index], dtype=torch.float64)
                numbers[index, : len(draft)], numbers[index, k] = own[:-1], own[-1]
            elif row.finish is None:
                numbers[index, k] = self.uniform[index, len(row.tokens)]
        numbers = numbers.to(p)
        n_accepted, following = verify_drafts(p[:, : k + 1], q, fed[:, 1:], numbers[:, :k], numbers[:, k])
        accepted, after = torch.stack((n_accepted, following)).tolist()
        tokens = [[*draft[:n], token] for draft, n, token in zip(drafts, accepted, after, strict=True)]
        return tokens, accepted

    def _count(self, index: int, drafted: int, accepted: int, new_tokens: int) -> None:
        length, stats = self.lengths[index], self.stats
        before = length.fallbacks
        length.update(drafted, accepted, new_tokens)
        stats.row_steps += 1
        stats.drafted += drafted
        stats.accepted += accepted
        stats.judged += min(accepted + 1, drafted)
        stats.fallbacks += length.fallbacks - before

    def _take(self, tokens: Sequence[list[int]], logits: Tensor, on_text: OnText | None) -> None:
        width = max(map(len, tokens))
        chosen = right_pad(tokens, width, [0] * len(tokens), self.device)
        logprobs = logits[:, :width].float().log_softmax(-1).gather(2, chosen[..., None])[..., 0].tolist()
        for index, (row, own) in enumerate(zip(self.rows, tokens, strict=True)):
            if row.finish is None:
                row.take(own, logprobs[index][: len(own)], on_text)
                self.texts[index] += own
                self._mark(index, own)

    def _mark(self, index: int, tokens: Sequence[int]) -> None:
        if self.seen is not None:
            self.seen[index, torch.tensor(list(tokens), device=self.device)] = True


def seen_along(seen: Tensor, fed: Tensor) -> Tensor:
    """Return what had been seen before each token that a round draws. Shape: seen [B, V] bool and fed [B, T] to
    [B, T, V]."""
    along = seen[:, None].repeat(1, fed.shape[1], 1)
    for at in range(1, fed.shape[1]):
        along[:, at:].scatter_(2, fed[:, at, None, None].expand(-1, fed.shape[1] - at, 1), True)
    return along
