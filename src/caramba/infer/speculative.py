"""Speculative decoding: drafted tokens are verified in one forward, and the text's distribution is the model's."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba.cache import Context
from caramba.config.generate import SpeculativeConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.parse import parse_as
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.infer.decode import prefill
from caramba.infer.drafting import Drafter, DraftLength, LookupDrafter, ModelDrafter
from caramba.infer.generator import Generated, GenerateStats, Generator, eval_mode
from caramba.infer.prompts import Prompt
from caramba.infer.row import OnText, Row
from caramba.infer.sampling import distribution, draw, uniforms
from caramba.infer.scoring import KINDS
from caramba.model import Model
from caramba.runtime import synchronize

DRAFT_SEED = 0x5BEC  # a row's draft and verification draw from a stream of their own


@dataclass
class SpeculativeStats(GenerateStats):
    """`steps` are forwards of the model after prefill; `judged` are drafts up to the first that was rejected."""

    drafted: int = 0
    accepted: int = 0
    judged: int = 0
    fallbacks: int = 0

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens per forward of the model: the speed-up if drafting and verifying cost no more than a step."""
        return self.new_tokens / self.steps if self.steps else 0.0


def verify_drafts(
    target: Tensor, proposed: Tensor, drafts: Tensor, accept: Tensor, redraw: Tensor
) -> tuple[Tensor, Tensor]:
    """Return how many drafts are accepted, and the token that follows them.

    Draft d_i is accepted with probability min(1, p_i(d_i) / q_i(d_i)). The first that is not is replaced by a draw from
    max(p_i - q_i, 0), normalised; if all are, one more token is drawn from p_{k+1}. The tokens are then distributed as
    if drawn from p one by one, whatever q is.

    Shape: target p [..., k + 1, V], proposed q [..., k, V], drafts [..., k], accept [..., k] and redraw [...] in
    [0, 1); returns [...] and [...] int64.

    Reference: Leviathan et al., 2022, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318.
    """
    k = drafts.shape[-1]
    p_of = target[..., :k, :].gather(-1, drafts[..., None])[..., 0]
    q_of = proposed.gather(-1, drafts[..., None])[..., 0]
    is_accepted = accept.to(p_of.dtype) * q_of < p_of
    n_accepted = is_accepted.long().cumprod(-1).sum(-1)
    padded = torch.cat((proposed, torch.zeros_like(target[..., :1, :])), dim=-2)  # q of the extra token: none
    at = n_accepted[..., None, None].expand(*n_accepted.shape, 1, target.shape[-1])
    p, q = target.gather(-2, at)[..., 0, :], padded.gather(-2, at)[..., 0, :]
    rest = (p - q).clamp(min=0)
    # Rounding alone can reject a draft where p and q are equal: nothing is left over, and p is right.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)
    return n_accepted, draw(rest, redraw)


class SpeculativeGenerator(Generator):
    """A Generator whose steps verify drafts of the row's own earlier text (`lookup`) or of a smaller model (`draft`).

    Lookup draws every token as the plain Generator does, from the same numbers, and keeps a draft that it equals: the
    same seed gives the same text as without speculation. A draft model's tokens go through rejection sampling, which
    accepts more of them; the text then follows the same distribution, and at temperature 0 is the same. Rejected
    tokens are taken back from both caches. One row at a time: the rows of a context advance together.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        draft: Model | None = None,
        **values: Any,
    ) -> None:
        """Take the keys of GenerateConfig and SpeculativeConfig by name.

        Raises:
            ConfigError: a value out of range, a method that lacks its draft model or has one too many, or a draft
            model of another vocabulary.
        """
        own = {key: value for key, value in values.items() if key in SpeculativeConfig.model_fields}
        super().__init__(model, tokenizer, **{key: value for key, value in values.items() if key not in own})
        self.speculation = parse_as(SpeculativeConfig, own)
        if self.config.cache_plan_probe:
            raise ConfigError(
                "speculation: cache_plan_probe is of generation without it; leave one of the two out"
            )
        if (draft is not None) != (self.speculation.spec_method == "draft"):
            raise ConfigError(
                f"speculation: spec_method={self.speculation.spec_method} "
                f"{'has no use for a draft model' if draft is not None else 'needs a draft model'}; "
                "spec_method=draft goes with one, lookup without"
            )
        if draft is not None and draft.spec.embedder.vocab_size != model.spec.embedder.vocab_size:
            raise ConfigError(
                f"speculation: the draft model has {draft.spec.embedder.vocab_size} vocabulary entries, the target "
                f"{model.spec.embedder.vocab_size}; use a draft of the same tokenizer"
            )
        self.draft = draft
        self.stats = SpeculativeStats()

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens of the last call."""
        return self.stats.acceptance_rate if isinstance(self.stats, SpeculativeStats) else 0.0

    def generate(
        self,
        prompts: Sequence[Prompt] | Tensor,
        *,
        mask: Tensor | None = None,
        seeds: Sequence[int] | None = None,
        on_text: OnText | None = None,
    ) -> list[Generated]:
        """Continue one prompt; see `Generator.generate`.

        Raises:
            ConfigError: more than one prompt, besides what the plain generator refuses.
        """
        if len(prompts) > 1 and not isinstance(prompts, str):
            raise ConfigError(
                f"speculation: got {len(prompts)} prompts; rows of a batch accept different numbers of drafts and the "
                "cache has one length for all, so give one prompt at a time, or generate without speculation"
            )
        with contextlib.nullcontext() if self.draft is None else eval_mode(self.draft):
            return super().generate(prompts, mask=mask, seeds=seeds, on_text=on_text)

    def _new_stats(self) -> SpeculativeStats:
        return SpeculativeStats()

    def _position_limits(self) -> list[int]:
        most = None if self.draft is None else self.draft.spec.embedder.max_positions
        return [*super()._position_limits(), *(() if most is None else (most,))]

    def _run(self, rows: Sequence[Row], on_text: OnText | None) -> None:
        stats = self.stats
        assert isinstance(stats, SpeculativeStats)
        row, device = rows[0], self.model.embedder.token.weight.device
        ctx = self._context(1, len(row.prompt) + self.config.max_new_tokens)
        began = time.perf_counter()
        tokens = torch.tensor([row.prompt], device=device)
        logits = prefill(self.model, tokens, ctx, self.config.prefill_chunk)
        synchronize(device)
        prefilled = time.perf_counter()
        verifier = _Verifier(self, row, ctx)
        verifier.take_first(logits, on_text)
        while row.finish is None:
            verifier.round(on_text)
        row.close(on_text)
        if self.config.compiled:
            stats.not_compiled = "speculation verifies a changing number of tokens"
        stats.fallbacks = verifier.length.fallbacks
        stats.prefill_s, stats.decode_s = prefilled - began, time.perf_counter() - prefilled
        stats.cache_bytes = ctx.nbytes() + verifier.draft_bytes


class _Verifier:
    """The rounds of one row. `ids` is all of its text; the cache holds all but the last of them."""

    def __init__(self, owner: SpeculativeGenerator, row: Row, ctx: Context) -> None:
        self.owner, self.row, self.ctx = owner, row, ctx
        self.config, self.model = owner.config, owner.model
        self.device = self.model.embedder.token.weight.device
        self.length = DraftLength(owner.speculation)
        self.uniform = uniforms(row.seed, self.config.max_new_tokens)
        self.generator = torch.Generator().manual_seed(row.seed ^ DRAFT_SEED)
        self.ids = list(row.prompt)
        self.draft_bytes = 0
        self.seen: Tensor | None = None
        if self.config.repetition_penalty != 1.0:
            self.seen = torch.zeros(self.model.spec.embedder.vocab_size, dtype=torch.bool, device=self.device)
            self._mark(row.prompt)
        self.drafter = self._drafter()

    def take_first(self, logits: Tensor, on_text: OnText | None) -> None:
        """Draw the token after the prompt, as ever."""
        p = distribution(logits[0], self.config, self.seen)
        token = int(draw(p, self.uniform[0].to(p)))
        self._take([token], logits, on_text)

    def round(self, on_text: OnText | None) -> None:
        """Draft, verify in one forward, keep what is accepted and one token more."""
        made = len(self.row.tokens)
        # The verifying forward adds a token itself, so the last one is never drafted.
        n = self.length.next(self.config.max_new_tokens - made - 1)
        drafts, q = self.drafter.propose(self.ids, n) if n else ([], None)
        fed = torch.tensor([[self.ids[-1], *drafts]], device=self.device)
        logits = self.model.logits(self.model.hidden(fed, self.ctx)[0])
        p = distribution(logits, self.config, self._seen_along(drafts))
        if q is None:
            drawn = draw(p, self.uniform[made : made + len(drafts) + 1].to(p)).tolist()
            equal = [a == b for a, b in zip(drafts, drawn, strict=False)]
            accepted = equal.index(False) if False in equal else len(drafts)
            tokens = drawn[: accepted + 1]
        else:
            accept, redraw = torch.rand(len(drafts) + 1, generator=self.generator, dtype=torch.float64).split(
                [len(drafts), 1]
            )
            taken = torch.tensor(drafts, device=self.device)
            n_accepted, following = verify_drafts(p, q, taken, accept.to(p), redraw[0].to(p))
            accepted = int(n_accepted)
            tokens = [*drafts[:accepted], int(following)]
        if accepted == len(drafts) > 0 and not self.owner.speculation.spec_extra_token:
            tokens.pop()
        stats = self.owner.stats
        assert isinstance(stats, SpeculativeStats)
        stats.steps += 1
        stats.drafted += len(drafts)
        stats.accepted += accepted
        stats.judged += min(accepted + 1, len(drafts))
        self.length.update(len(drafts), accepted, len(tokens))
        self._take(tokens, logits, on_text)
        self.ctx.truncate(len(self.ids) - 1)

    def _take(self, tokens: list[int], logits: Tensor, on_text: OnText | None) -> None:
        chosen = torch.tensor(tokens, device=self.device)
        logprobs = logits[: len(tokens)].float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        self.row.take(tokens, logprobs.tolist(), on_text)
        self.ids += tokens
        self._mark(tokens)

    def _drafter(self) -> Drafter:
        draft, config = self.owner.draft, self.config
        if draft is None:
            return LookupDrafter(self.owner.speculation.max_ngram)
        kind = KINDS.get(draft.embedder.token.weight.dtype, KVCacheKind.FP32)
        ctx = draft.new_context(1, len(self.row.prompt) + config.max_new_tokens, kind, static=True)
        self.draft_bytes = ctx.nbytes()
        return ModelDrafter(draft, ctx, config, self.generator)

    def _mark(self, tokens: Sequence[int]) -> None:
        if self.seen is not None:
            self.seen[torch.tensor(list(tokens), device=self.device)] = True

    def _seen_along(self, drafts: Sequence[int]) -> Tensor | None:
        """Return what had been seen before each token of a round, [k + 1, V]."""
        if self.seen is None:
            return None
        seen = self.seen.repeat(len(drafts) + 1, 1)
        for index, token in enumerate(drafts):
            seen[index + 1 :, token] = True
        return seen
