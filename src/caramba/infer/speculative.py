"""Speculative decoding: drafted tokens are verified in one forward, and the text's distribution is the model's."""

import contextlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba.cache import Context, DeviceContext
from caramba.config.cache_policy import step_capacity
from caramba.config.generate import SpeculativeConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.config.parse import parse_as
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.infer.device_steps import (
    DecodeForm,
    EagerDecoder,
    Steps,
    captures_of,
    choose_steps,
    compilations,
    resolve_form,
    step_refusal,
    step_threads,
)
from caramba.infer.drafting import Drafter, LookupDrafter, ModelDrafter
from caramba.infer.generator import Generated, Generator, eval_mode
from caramba.infer.lookup_rounds import LookupLoop, LookupRounds
from caramba.infer.prompts import Prompt
from caramba.infer.ragged import Network, device_of, prefill_rows
from caramba.infer.row import GenerationRow, OnText
from caramba.infer.scoring import KINDS
from caramba.infer.step import StepState
from caramba.infer.step_pool import identity_of
from caramba.infer.verification import SpeculativeStats, Verifier, VerifyForwards
from caramba.lower.lowering import lower
from caramba.model import EarlyExit, Model
from caramba.ops.dba_decode import MAX_QUERIES
from caramba.runtime import synchronize

DRAFT_SEED = 0x5BEC  # a row's draft and verification draw from a stream of their own
TIMED_STEPS = 16


@dataclass
class Kept:
    """The context of the last call, and what was captured on it."""

    key: tuple[Any, ...]
    ctx: Context
    steps: VerifyForwards | None = None
    rounds: LookupRounds | None = None


class SpeculativeGenerator(Generator):
    """A Generator whose steps verify drafts: of the row's own earlier text (`lookup`), of a smaller model (`draft`),
    or of the model's own first blocks (`early_exit`), which read and write the model's own first caches.

    Lookup draws every token as the plain Generator does, from the same numbers, and keeps a draft that it equals:
    the same seed gives the same text as without speculation. Where forwards run on the device by themselves its
    rounds do too (`LookupRounds`), and the host chooses which of them verify drafts (`DraftController`). Tokens of the
    other two go through rejection sampling, which accepts more of them; the text then follows the same
    distribution, and at temperature 0 is the same.

    The rows of a batch accept different numbers of drafts: every row has its own position in both caches, and
    what was rejected is taken back row by row, so a row's text is that of the row alone. Where a cache cannot hold
    rows of different lengths (a quantised one, say) rows run one after another, and `stats.not_batched` has the reason.
    """

    def __init__(
        self, model: Model, tokenizer: Tokenizer | None = None, *, draft: Model | None = None, **values: Any
    ) -> None:
        """Take the keys of GenerateConfig and SpeculativeConfig by name.

        Raises:
            ConfigError: a value out of range, a method that lacks its draft model or has one too many, a draft
            model of another vocabulary, or a topology that cannot be left early.
        """
        own = {key: value for key, value in values.items() if key in SpeculativeConfig.model_fields}
        super().__init__(model, tokenizer, **{key: value for key, value in values.items() if key not in own})
        self.speculation = parse_as(SpeculativeConfig, own)
        method = self.speculation.spec_method
        if self.config.cache_plan_probe:
            raise ConfigError("speculation: cache_plan_probe is of generation without it; leave one of the two out")
        if (draft is not None) != (method == "draft"):
            raise ConfigError(
                f"speculation: spec_method={method} "
                f"{'has no use for a draft model' if draft is not None else 'needs a draft model'}; "
                "spec_method=draft goes with one, lookup and early_exit without"
            )
        if draft is not None and draft.spec.embedder.vocab_size != model.spec.embedder.vocab_size:
            raise ConfigError(
                f"speculation: the draft model has {draft.spec.embedder.vocab_size} vocabulary entries, the target "
                f"{model.spec.embedder.vocab_size}; use a draft of the same tokenizer"
            )
        self.draft = draft
        self.first_blocks = EarlyExit(model, self.speculation.spec_draft_layers) if method == "early_exit" else None
        self.stats = SpeculativeStats()
        self._kept: Kept | None = None
        self._last: list[int] = []

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens of the last call."""
        return self.stats.acceptance_rate if isinstance(self.stats, SpeculativeStats) else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of a row per forward for it, of the last call."""
        return self.stats.tokens_per_step if isinstance(self.stats, SpeculativeStats) else 0.0

    def generate(self, prompts: Sequence[Prompt] | Tensor, **given: Any) -> list[Generated]:
        """Continue prompts; see `Generator.generate`."""
        with contextlib.ExitStack() as stack:
            if self.draft is not None:
                stack.enter_context(eval_mode(self.draft))
                stack.enter_context(lower(self.draft, device_of(self.draft), "decode"))
            rows = super().generate(prompts, **given)
        self._last = [*rows[0].prompt, *rows[0].tokens]
        return rows

    @torch.inference_mode()
    def speed_up(self) -> float | None:
        """Return the last call's decode speed as a multiple of that of one token a step, or None before one.

        Such a step for as many rows, draw and forward, is timed here: the mean of some on a cache that holds the
        first row's text, captured where the call's forwards were. It is an estimate at the price of a prefill and those
        steps.
        """
        stats, text = self.stats, self._last
        assert isinstance(stats, SpeculativeStats)
        n_rows = stats.most_rows
        n_steps = min(TIMED_STEPS, len(text) - 1)
        if n_steps < 1 or not stats.row_steps:
            return None
        device, seconds = device_of(self.model), []
        with eval_mode(self.model), lower(self.model, device, "decode"):
            ctx = self.model.new_context(n_rows, len(text), KVCacheKind(stats.cache_kind), static=True)
            prompts = [text[:-n_steps]] * n_rows
            steps = self._plain_steps(prompts, ctx, is_captured=stats.decode.endswith("graph"))
            logits = self.model.logits(prefill_rows(self.model, prompts, ctx, self.config.prefill_chunk))
            steps.resume()
            for _ in range(n_steps):
                synchronize(device)
                captures, began = captures_of(steps), time.perf_counter()
                logits = steps.forward(steps.choose(logits))
                synchronize(device)
                if captures_of(steps) == captures:
                    seconds.append(time.perf_counter() - began)
        if not seconds:
            return None
        return stats.tokens_per_step * statistics.fmean(seconds) * stats.steps / stats.decode_s

    def _plain_steps(self, prompts: list[list[int]], ctx: Context, *, is_captured: bool) -> Steps:
        config = self.config.model_copy(update={"compiled": "graph" if is_captured else False})
        rows = GenerationRow.of(prompts, config, (), self.tokenizer, None)
        state = StepState.of(rows, config, self.model.spec.embedder.vocab_size, device_of(self.model))
        return choose_steps(EagerDecoder(self.model, state, ctx, config))[0]

    def _new_stats(self) -> SpeculativeStats:
        return SpeculativeStats()

    def _position_limits(self) -> list[int]:
        most = None if self.draft is None else self.draft.spec.embedder.max_positions
        return [*super()._position_limits(), *(() if most is None else (most,))]

    def _run(self, rows: Sequence[GenerationRow], on_text: OnText | None) -> None:
        stats, config = self.stats, self.config
        assert isinstance(stats, SpeculativeStats)
        n_tokens = max(len(row.prompt) for row in rows) + config.max_new_tokens
        # Rows that draft nothing any more are still fed as many tokens as the others, and graphs are filled up.
        slack = self.speculation.spec_k if len(rows) > 1 else 0
        ctx, refused = self._opened(len(rows), n_tokens, slack)
        draft_ctx = self._draft_context(ctx, len(rows), n_tokens + slack)
        reason = None if len(rows) == 1 else self._rows_refusal(ctx, draft_ctx)
        if reason is not None:
            del ctx, draft_ctx
            stats.not_batched = reason
            for row in rows:
                self._run([row], on_text)
            return
        self._speculate(rows, ctx, draft_ctx, refused, on_text)

    def _opened(self, n_rows: int, n_tokens: int, slack: int) -> tuple[Context, str | None]:
        """Return an empty context; where forwards may run on the device, that of the last call if it fits as well.

        Where they may not for the room that they take beyond the text, it is one without, and the reason comes along.
        """
        kind = self._kind(n_rows, n_tokens)
        form, _ = resolve_form(self.config.compiled, device_of(self.model))
        refused = None
        if form != "eager" and kind in EXACT_KINDS:
            try:
                ctx = self._bucket(n_rows, n_tokens, slack, kind)
                refused = step_refusal(self.model, ctx, is_ragged=True)
                if refused is None:
                    return ctx, None
                del ctx
            except torch.OutOfMemoryError:
                if self.config.compiled != "auto":
                    raise
                # Nobody asked for graphs, and the text's own length may fit.
                refused = "the longer cache that it takes to keep graphs does not fit"
            self._kept = None
        # Rows that accept different numbers of drafts index the whole cache; one row takes back at most 16 tokens.
        ctx = self.model.new_context(n_rows, n_tokens + slack, kind, static=True, windowed=n_rows == 1)
        return ctx, refused

    def _bucket(self, n_rows: int, n_tokens: int, slack: int, kind: KVCacheKind) -> Context:
        """Return an empty context of a text's length bucket, no longer than positions and forwards on it reach."""
        beyond = slack + MAX_QUERIES
        reached = (layer.projection.step_limit for _, layer in self.model.attention_layers())
        limits = [
            *(limit + beyond for limit in self._position_limits()),
            *(n for n in reached if n is not None),
        ]
        capacity = step_capacity(n_tokens + beyond, min(limits, default=None))
        key = (identity_of(self.model), n_rows, capacity, kind)
        if self._kept is not None and self._kept.key == key:
            self._kept.ctx.truncate(0)
        else:
            self._kept = None  # its memory first
            self._kept = Kept(key, self.model.new_context(n_rows, capacity, kind, static=True))
        return self._kept.ctx

    def _row_steps(self, ctx: Context, lengths: Sequence[int], form: DecodeForm) -> VerifyForwards:
        kept = self._kept
        if kept is not None and kept.ctx is ctx and kept.steps is not None:
            kept.steps.ctx.rewind(lengths)
            return kept.steps
        rows_ctx = DeviceContext.ragged(ctx, lengths)
        rows_ctx.last = min([rows_ctx.limit, *self._position_limits()]) - 1
        steps = VerifyForwards(self.model, rows_ctx, is_compiled="compiled" in form, is_captured="graph" in form)
        if kept is not None and kept.ctx is ctx:
            kept.steps = steps
        return steps

    def _rounds(self, rows: Sequence[GenerationRow], steps: VerifyForwards) -> LookupRounds:
        kept = self._kept
        rounds = None if kept is None or kept.steps is not steps else kept.rounds
        if rounds is None or rounds.config != self.config:  # which graphs hold as constants
            rounds = LookupRounds(steps, self.config, self.speculation)
            if kept is not None and kept.steps is steps:
                kept.rounds = rounds
        rounds.refill(rows)
        return rounds

    def _speculate(
        self,
        rows: Sequence[GenerationRow],
        ctx: Context,
        draft_ctx: Context | None,
        refused: str | None,
        on_text: OnText | None,
    ) -> None:
        stats, config, device = self.stats, self.config, device_of(self.model)
        assert isinstance(stats, SpeculativeStats)
        prompts = [row.prompt for row in rows]
        began = time.perf_counter()
        hidden = prefill_rows(self.model, prompts, ctx, config.prefill_chunk)
        synchronize(device)
        prefilled = time.perf_counter()
        last = max(map(len, prompts)) + config.max_new_tokens - 1
        form, stats.not_compiled = ("eager", refused) if refused is not None else self._form(ctx, draft_ctx)
        has_rows = len(rows) > 1 or form != "eager"
        lengths = [len(ids) for ids in prompts]
        steps = None if form == "eager" else self._row_steps(ctx, lengths, form)
        rows_ctx = steps.ctx if steps is not None else DeviceContext.ragged(ctx, lengths, last) if has_rows else ctx
        stats.decode = form
        rounds = None if steps is None or draft_ctx is not None else self._rounds(rows, steps)
        captures = captures_of(steps) + captures_of(rounds)
        compiled = compilations() if form.startswith("compiled") else 0
        if rounds is not None:
            loop = LookupLoop(rows, rounds, self.speculation, stats)
            with step_threads(self.model, len(rows)):
                loop.run(self.model.logits(hidden), on_text)
        else:
            generators = [torch.Generator().manual_seed(row.seed ^ DRAFT_SEED) for row in rows]
            drafter = self._drafter(rows, ctx, draft_ctx, last, generators, has_rows)
            verifier = Verifier(self.model, rows, rows_ctx, config, self.speculation, drafter, generators, stats, steps)
            verifier.take_first(self.model.logits(hidden), on_text)
            with step_threads(self.model, len(rows)):
                while not verifier.is_done:
                    verifier.round(on_text)
        for row in rows:
            row.close(on_text)
        stats.captures += captures_of(steps) + captures_of(rounds) - captures
        stats.compilations += compilations() - compiled if form.startswith("compiled") else 0
        stats.most_rows = max(stats.most_rows, len(rows))
        drawn = [len(row.tokens) + (row.finish == "eos") for row in rows]
        stats.step_tokens += sum(max(0, n - 1) for n in drawn)
        stats.prefill_s += prefilled - began
        stats.decode_s += time.perf_counter() - prefilled
        own_draft = 0 if draft_ctx is None or self._shares(ctx) else draft_ctx.nbytes()
        stats.cache_bytes = max(stats.cache_bytes, ctx.nbytes() + own_draft)

    def _drafter(
        self,
        rows: Sequence[GenerationRow],
        ctx: Context,
        draft_ctx: Context | None,
        last: int,
        generators: Sequence[torch.Generator],
        has_rows: bool,
    ) -> Drafter:
        network = self._network()
        if network is None or draft_ctx is None:
            return LookupDrafter(self.speculation.max_ngram, len(rows))
        prompts = [row.prompt for row in rows]
        lengths, is_shared = [len(ids) for ids in prompts], self._shares(ctx)
        if not is_shared:
            prefill_rows(network, prompts, draft_ctx, self.config.prefill_chunk)
        many = DeviceContext.ragged(draft_ctx, lengths, last) if has_rows else None
        return ModelDrafter(
            network,
            many or draft_ctx,
            self.config,
            generators,
            held=lengths,
            is_shared=is_shared,
            shared_with=ctx if is_shared and many is None else None,
        )

    def _network(self) -> Network | None:
        return self.draft if self.draft is not None else self.first_blocks

    def _shares(self, ctx: Context) -> bool:
        """Whether drafts go through the target's own caches: those of first blocks, unless they are quantised.

        A quantised cache packs its tail as tokens come. To take drafts back would leave packed earlier what is packed
        later without them, and the text would no longer be that of the model on this cache.
        """
        kinds = {tensor.config.kind for cache in ctx.caches for tensor in cache.tensors.values()}
        return self.first_blocks is not None and kinds.issubset(EXACT_KINDS)

    def _draft_context(self, ctx: Context, batch_size: int, n_tokens: int) -> Context | None:
        network = self._network()
        if network is None:
            return None
        if self.first_blocks is not None and self._shares(ctx):
            return self.first_blocks.shared(ctx)
        dtype = next(network.embedder.parameters()).dtype
        return network.new_context(batch_size, n_tokens, KINDS.get(dtype, KVCacheKind.FP32), static=True)

    def _form(self, ctx: Context, draft_ctx: Context | None) -> tuple[DecodeForm, str | None]:
        """Return how verifying forwards run, and why not as asked, if so."""
        form, reason = resolve_form(self.config.compiled, device_of(self.model))
        if form != "eager":
            reason = self._rows_refusal(ctx, draft_ctx)
        return (form if reason is None else "eager"), reason

    def _rows_refusal(self, ctx: Context, draft_ctx: Context | None) -> str | None:
        """Return why rows cannot stand at positions of their own in the caches, None where they can."""
        reason = step_refusal(self.model, ctx, is_ragged=True)
        if reason is None and self.draft is not None and draft_ctx is not None:
            reason = step_refusal(self.draft, draft_ctx, is_ragged=True)
        return reason
