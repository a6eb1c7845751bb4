"""Text from a model: prefill, then one step for all rows at a time, until every row has ended."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from caramba.cache import Context
from caramba.config.cache_policy import CacheKeys, q_chunk_for
from caramba.config.generate import GenerateConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.config.parse import parse_as
from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.infer.decode import prefill
from caramba.infer.device_steps import (
    DecodeForm,
    EagerDecoder,
    Steps,
    captures_of,
    choose_steps,
    compilations,
    step_threads,
)
from caramba.infer.eval_text import EvalText
from caramba.infer.policy import CacheDecision, CachePolicy, CacheProbe, fed_tokens
from caramba.infer.prompts import Prompt, encode_prompts, group_by_length, refuse_prompts
from caramba.infer.ragged import device_of
from caramba.infer.row import GenerationRow, OnText
from caramba.infer.scoring import default_kind
from caramba.infer.step import StepState
from caramba.infer.step_pool import StepPool
from caramba.layer.attention import AttentionLayer
from caramba.layer.memory_bank import MemoryBankLayer
from caramba.lower.lowering import lower
from caramba.model import Model
from caramba.runtime import synchronize


@contextlib.contextmanager
def planned(model: Model, config: CacheKeys, n_tokens: int) -> Iterator[dict[str, int | None]]:
    """Run a block with the attention that the decode plan sets for prompts of `n_tokens`, then restore it.

    `auto` sets `q_chunk` in layers that have none and build a mask (a window or null attention), whose memory is
    queries times keys; plain causal attention needs none. `fixed` sets it in all layers. Both leave every result as
    it is. Only `decode_local_window` changes results. The block gets what was set.

    Raises:
        ConfigError: a window for a layer that keeps its first tokens at full precision.
    """
    scores = [(layer, layer.score.q_chunk, layer.score.window) for _, layer in model.attention_layers()]
    window = config.decode_local_window
    if window is not None and any(layer.dims.first_tokens for layer, _, _ in scores):
        raise ConfigError(
            f"decode_local_window={window}: this model has exact_first_tokens, which a window would hide; leave it out"
        )
    if window is not None and any(isinstance(layer, MemoryBankLayer) for layer, _, _ in scores):
        raise ConfigError(
            f"decode_local_window={window}: this model has memory slots, which are written for local_window; leave it "
            "out"
        )
    try:
        for layer, q_chunk, own in scores:
            layer.score.q_chunk = _q_chunk(layer, q_chunk, config, n_tokens)
            if window is not None:
                layer.score.window = window if own is None else min(own, window)
        yield {
            "q_chunk": min((layer.score.q_chunk for layer, _, _ in scores if layer.score.q_chunk), default=None),
            "local_window": window,
        }
    finally:
        for layer, q_chunk, own in scores:
            layer.score.q_chunk, layer.score.window = q_chunk, own


def _q_chunk(layer: AttentionLayer, own: int | None, config: CacheKeys, n_tokens: int) -> int | None:
    if config.decode_plan == "fixed":
        return config.decode_q_chunk
    has_mask = layer.config.null_attn or layer.score.window is not None
    if config.decode_plan == "none" or own is not None or not has_mask:
        return own
    return q_chunk_for(n_tokens)


READ_EVERY = 8


@dataclass(frozen=True)
class Generated:
    """What followed one prompt.

    Attributes:
        tokens: the new tokens, without the end mark; with the one that completed a stop text.
        logprobs: log softmax(logits) in nats of each, before temperature, penalty and filters.
        text: of the new tokens, cut where a stop text begins; None without a tokenizer.
        finish: `eos`, `stop`, or `length`.
        seed: gives the same tokens again, alone or in any batch.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str | None
    finish: Literal["eos", "stop", "length"]
    seed: int


@dataclass(frozen=True)
class SeenText:
    """A context of one row, and the tokens that it has seen."""

    ctx: Context
    tokens: tuple[int, ...]

    def fits(self, prompt: Sequence[int], ctx: Context) -> bool:
        """Whether a prompt begins with the tokens, and an empty context can take what this one holds."""
        n_tokens, kinds = len(self.tokens), [[(type(c), c.kind) for c in x.caches] for x in (self.ctx, ctx)]
        return kinds[0] == kinds[1] and n_tokens < len(prompt) and tuple(prompt[:n_tokens]) == self.tokens


@dataclass
class GenerateStats:
    """Time and memory of the last call: decode runs from the first token on, and counts tokens that rows kept.

    Attributes:
        decode: how steps ran last, see `GenerateConfig.compiled`.
        not_compiled: why they ran otherwise than asked, if so.
        captures: CUDA graphs that were captured; none where an earlier call left those of its length.
        compilations: graphs that torch.compile made during decode.
    """

    prefill_s: float = 0.0
    decode_s: float = 0.0
    steps: int = 0
    new_tokens: int = 0
    cache_bytes: int = 0
    cache_kind: str = ""
    decode: DecodeForm = "eager"
    not_compiled: str | None = None
    captures: int = 0
    compilations: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over the time of prefill and decode."""
        spent = self.prefill_s + self.decode_s
        return self.new_tokens / spent if spent > 0 else 0.0


class Generator:
    """Generates from one model, in eval mode. `stats` tells of the last call, `cache_decision` what
    `cache_kind=auto` chose for it and why.

    Rows of unequal length need no padding: a batch starts at its shortest prompt, and the longer ones are fed their
    own tokens while the shorter ones are fed sampled ones. So every row has its own positions from 0, and batch
    equals single up to the rounding of a product of another shape. Rows whose prompts differ by more than
    `max_new_tokens` run after each other.

    With `keeps_seen`, what an exact cache holds after the prompt of a single row stays in `seen`, and a prompt that
    begins with those tokens runs from there; not with speculation.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        config: GenerateConfig | None = None,
        held_out: EvalText | None = None,
        *,
        device: torch.device | str | None = None,
        **values: Any,
    ) -> None:
        """Take a config, or its keys by name.

        `device` is where the model is moved to, if it is given. `held_out` is the text that `cache_kind=auto` is judged
        on, unless one is named.

        Raises:
            ConfigError: a value out of range, or a text that cannot be read.
        """
        given = {} if config is None else config.model_dump(exclude_unset=True)
        self.config = parse_as(GenerateConfig, given | values)
        self.model, self.tokenizer = model if device is None else model.to(device), tokenizer
        self.stats = GenerateStats()
        self.keeps_seen = False
        self.seen: SeenText | None = None
        self.pool = StepPool()
        self.held_out = held_out
        is_auto = self.config.cache_kind is KVCacheKind.AUTO
        self.policy = CachePolicy(model, tokenizer, self.config, held_out) if is_auto else None
        self.cache_decision: CacheDecision | None = None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a row: those of the config, without any there the tokenizer's end mark."""
        if self.config.eos_token_id is None and self.tokenizer is not None:
            return (self.tokenizer.eos_id,)
        return self.config.eos_ids

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Prompt] | Tensor,
        *,
        mask: Tensor | None = None,
        seeds: Sequence[int] | None = None,
        on_text: OnText | None = None,
    ) -> list[Generated]:
        """Continue every prompt: texts, lists of ids, or a padded tensor [B, T] int64 with its mask [B, T].

        Args:
            seeds: one per row; without them the config's seed, one more for each further row.
            on_text: called with the row and its next piece of text, whole characters and nothing that is cut later.

        Raises:
            ConfigError: an empty or too long prompt, a token outside the vocabulary, or a wrong number of seeds.
            CheckpointError: the model's logits are not numbers.
        """
        config = self.config
        found = encode_prompts(prompts, self.tokenizer, mask)
        spec = self.model.spec.embedder
        refuse_prompts(
            found,
            vocab_size=spec.vocab_size,
            max_new_tokens=config.max_new_tokens,
            limit=min(self._position_limits(), default=None),
        )
        rows = GenerationRow.of(found, config, self.eos_ids, self.tokenizer, seeds)
        self.stats = self._new_stats()
        with (
            eval_mode(self.model),
            planned(self.model, config, max(map(len, found))),
            lower(self.model, device_of(self.model), "decode", is_compiled=config.compiled is True),
        ):
            for group in group_by_length([len(ids) for ids in found], config.max_new_tokens):
                self._run([rows[index] for index in group], on_text)
        self.stats.new_tokens = sum(len(row.tokens) for row in rows)
        return [
            Generated(
                tuple(row.prompt),
                tuple(row.tokens),
                tuple(row.logprobs),
                row.text if self.tokenizer is not None else None,
                row.finish or "length",
                row.seed,
            )
            for row in rows
        ]

    def _new_stats(self) -> GenerateStats:
        return GenerateStats()

    def _position_limits(self) -> list[int]:
        stated = (self.config.max_seq_len, self.model.spec.embedder.max_positions)
        return [limit for limit in stated if limit is not None]

    def _run(self, rows: Sequence[GenerationRow], on_text: OnText | None) -> None:
        config, device = self.config, self.model.embedder.token.weight.device
        lengths = [len(row.prompt) for row in rows]
        start, longest = min(lengths), max(lengths)
        n_tokens = longest + config.max_new_tokens
        kind, limit = self._kind(len(rows), n_tokens), min(self._position_limits(), default=None)
        began = time.perf_counter()
        ready = self.pool.prepare(self.model, rows, config, kind, n_tokens, limit)
        ctx, state, steps = ready.ctx, ready.state, ready.steps
        self.stats.decode, self.stats.not_compiled = ready.form, ready.not_compiled
        done = self._continue(rows[0].prompt, ctx) if len(rows) == 1 else 0
        logits = prefill(self.model, state.prompts[:, done:start], ctx, config.prefill_chunk)
        if self.keeps_seen and len(rows) == 1 and kind in EXACT_KINDS:
            self.seen = SeenText(ctx.clone(), tuple(rows[0].prompt))
        synchronize(device)
        prefilled = time.perf_counter()
        probe = self._probe()
        steps.resume()
        first, captured = steps, captures_of(steps)
        compiled = compilations() if config.compiled is True else 0
        n_steps = longest - start + config.max_new_tokens
        every = config.read_every or (1 if on_text is not None else READ_EVERY)
        with step_threads(self.model, len(rows)):
            for step in range(n_steps):
                token = steps.choose(logits)
                is_last = step + 1 == n_steps
                if (is_last or (step + 1) % every == 0) and state.read(rows, start + step + 1, on_text):
                    break
                if not is_last:
                    if probe is not None:
                        fed = (state.prompts, state.delay + start, state.tokens, ctx.position)
                        checked = probe.check(ctx, partial(fed_tokens, *fed))
                        self.stats.cache_kind = probe.kind.value
                        if checked is not ctx:  # another cache has steps of its own
                            ctx, steps = checked, self._steps(state, checked)
                    logits = steps.forward(token)
                    self.stats.steps += 1
        for row in rows:
            row.close(on_text)
        self.stats.captures += captures_of(steps) - (captured if steps is first else 0)
        self.stats.compilations += compilations() - compiled if config.compiled is True else 0
        self.stats.prefill_s += prefilled - began
        self.stats.decode_s += time.perf_counter() - prefilled
        self.stats.cache_bytes = max(self.stats.cache_bytes, ctx.nbytes())

    def _continue(self, prompt: Sequence[int], ctx: Context) -> int:
        """Load what was seen of a prompt into an empty context; return how many of its tokens that are."""
        if self.seen is None or not self.seen.fits(prompt, ctx):
            return 0
        ctx.load_state_dict(self.seen.ctx.state_dict())
        return ctx.position

    def _steps(self, state: StepState, ctx: Context) -> Steps:
        steps, self.stats.decode, self.stats.not_compiled = choose_steps(
            EagerDecoder(self.model, state, ctx, self.config)
        )
        return steps

    def _probe(self) -> CacheProbe | None:
        if self.policy is None or self.cache_decision is None or not self.config.cache_plan_probe:
            return None
        return CacheProbe(self.policy, self.cache_decision)

    def _kind(self, batch_size: int, n_tokens: int) -> KVCacheKind:
        kind = self.config.cache_kind or default_kind(self.model)
        if self.policy is not None:
            self.cache_decision = self.policy.decide(batch_size, n_tokens)
            kind = self.cache_decision.kind
        self.stats.cache_kind = kind.value
        return kind


@contextlib.contextmanager
def eval_mode(model: Model) -> Iterator[None]:
    """Run a block with the model in eval mode, then as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def generate(
    model: Model,
    prompts: Sequence[Prompt] | Tensor,
    tokenizer: Tokenizer | None = None,
    *,
    mask: Tensor | None = None,
    seeds: Sequence[int] | None = None,
    on_text: OnText | None = None,
    **values: Any,
) -> list[Generated]:
    """Continue prompts with a model; `values` are the keys of GenerateConfig. See `Generator.generate`."""
    return Generator(model, tokenizer, **values).generate(prompts, mask=mask, seeds=seeds, on_text=on_text)
