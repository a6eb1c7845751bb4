"""The memory of all slots and the forwards over it: a prompt's chunk in one row, or a token in every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from caramba.cache import Context, SlotContext
from caramba.cache.slots import IDLE
from caramba.config.engine import EngineConfig
from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.infer.decode import decode_step
from caramba.infer.device_steps import DecodeForm, next_logits, step_refusal
from caramba.infer.engine.sampler import SlotSampler
from caramba.infer.scoring import KINDS
from caramba.model import Model

ROUND = 64
"""What a forward reads is rounded up to a multiple of this where the host knows the lengths."""


class Slots:
    """`n_slots` rows of one static cache. A prompt runs in its row alone; a step runs all decoding rows in one
    forward, each at its own position, where the cache's lengths can be counted on the device, and else one row after
    the other, for the reason in `one_by_one`.

    Attributes:
        lengths: tokens that each slot holds.
        logits: after each slot's last token, [n_slots, V].
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        weight = model.embedder.token.weight
        self.model, self.device = model, weight.device
        self.kind = config.cache_kind or KINDS.get(weight.dtype, KVCacheKind.FP32)
        if self.kind is KVCacheKind.AUTO:
            raise ConfigError(
                "engine: cache_kind=auto is chosen for one generation by measuring it; name a kind, as "
                "`caramba generate --cache-kind auto` reports it"
            )
        n, vocab_size = config.n_slots, model.spec.embedder.vocab_size
        self.ctx = model.new_context(n, config.max_len, self.kind, static=True)
        self.rows = [self.ctx.row(index) for index in range(n)]
        self.one_by_one = step_refusal(model, self.ctx)
        self.step = SlotContext(self.ctx) if self.one_by_one is None else None
        self.lengths = [0] * n
        self.is_decoding = [False] * n
        self.sampler = SlotSampler(n, config.max_len, vocab_size, self.device)
        self.logits: Tensor | None = None
        self._is_changed = True

    def prefill(self, slot: int, tokens: Sequence[int], *, is_last: bool) -> None:
        """Run the next tokens of a slot's prompt; those that are its last leave logits to draw from."""
        ctx = self.rows[slot]
        hidden = self.model.hidden(torch.tensor([list(tokens)], device=self.device), ctx)
        self.lengths[slot] = ctx.position
        if is_last:
            logits = self.model.logits(hidden[:, -1])
            if self.logits is None:
                self.logits = logits.new_zeros(len(self.rows), logits.shape[-1])
            self.logits[slot] = logits[0]
            self.set_decoding(slot, True)

    def set_decoding(self, slot: int, is_decoding: bool) -> None:
        """Let a slot take part in the next forwards, or no longer."""
        self.is_decoding[slot] = is_decoding
        self._is_changed = True

    def choose(self) -> Tensor:
        """Draw every decoding slot's next token; what idle slots get has no meaning. Shape: [n_slots]."""
        assert self.logits is not None
        return self.sampler.choose(self.logits)

    def forward(self) -> Mapping[int, Exception]:
        """Run the drawn tokens of the decoding slots, and return what failed, by slot."""
        decoding = [slot for slot, is_decoding in enumerate(self.is_decoding) if is_decoding]
        if self.step is None:
            return self._forward_one_by_one(decoding)
        try:
            if self._is_changed:
                self.step.hold(
                    [n if on else IDLE for n, on in zip(self.lengths, self.is_decoding, strict=True)]
                )
                self._is_changed = False
            longest = max(self.lengths[slot] for slot in decoding) + 1
            self.step.visible = min(-(-longest // ROUND) * ROUND, self.step.limit)
            self._take(next_logits(self.model, self.sampler.token, self.step))
        except Exception as error:
            self._is_changed = True
            return dict.fromkeys(decoding, error)
        for slot in decoding:
            self.lengths[slot] += 1
        return {}

    def clear(self, slot: int) -> None:
        """Make a slot idle and overwrite all that it holds."""
        self.set_decoding(slot, False)
        self.lengths[slot] = 0
        self.rows[slot].clear()
        self.sampler.leave(slot)
        if self.logits is not None:
            self.logits[slot] = 0.0

    def row(self, slot: int) -> Context:
        """Return a slot's own context, which counts all tokens that the slot holds."""
        ctx, n_tokens = self.rows[slot], self.lengths[slot]
        for cache in ctx.caches:
            if cache.n_tokens < n_tokens:  # steps on the device count there alone
                cache.advance(n_tokens - cache.n_tokens)
        ctx.position = n_tokens
        return ctx

    def _take(self, logits: Tensor) -> None:
        assert self.logits is not None
        self.logits.copy_(logits)

    def _forward_one_by_one(self, decoding: Sequence[int]) -> Mapping[int, Exception]:
        assert self.logits is not None
        failed: dict[int, Exception] = {}
        for slot in decoding:
            try:
                self.logits[slot] = decode_step(
                    self.model, self.sampler.token[slot : slot + 1], self.rows[slot]
                )[0]
                self.lengths[slot] += 1
            except Exception as error:
                failed[slot] = error
        return failed

    @property
    def not_compiled(self) -> str | None:
        """Why steps run otherwise than asked, if so."""
        return self.one_by_one

    @property
    def form(self) -> DecodeForm | str:
        """How steps run."""
        return "eager" if self.step is not None else "rows"
