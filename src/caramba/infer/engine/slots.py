"""The memory of all slots and the forwards over it: a prompt's chunk in one row, or a token in every row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from caramba.cache import Context, DeviceContext
from caramba.cache.device_context import IDLE
from caramba.config.generate import EngineConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.infer.decode import decode_step
from caramba.infer.device_steps import (
    Captured,
    DecodeForm,
    capture_graph,
    compile_logits,
    find_angles,
    form_of,
    n_weights_of,
    next_logits,
    replay_graph,
    resolve_form,
    step_refusal,
)
from caramba.infer.engine.prompts import WHOLE, PromptForwards, fill_slots, pack_prompts, sizes_of
from caramba.infer.engine.sampler import Form, SlotSampler
from caramba.infer.engine.upload import upload
from caramba.infer.scoring import default_kind
from caramba.infer.step_pool import addresses
from caramba.layer import unplanned_attention
from caramba.model import Model

ROUND = 64
"""What a forward reads is rounded up to a multiple of this where the host knows the lengths."""


class Slots:
    """`n_slots` rows of one static cache. A prompt runs in its row alone; a step runs all decoding rows in one
    forward, each at its own position, where the cache's lengths can be counted on the device, and else one row after
    the other. `n_ahead` more rows hold prompts that have run ahead of a free slot; they `move` there.

    Attributes:
        form: how steps run; `rows` one row after the other.
        not_compiled: why they run otherwise than asked, if so.
        n_weights: of the model, what a row of a step multiplies by.
        prompts: whole prompts in captured forwards, None where they run as they come, or once a capture has failed.
        n_ahead: rows behind the slots, see `EngineConfig`. not_ahead: why there are none, if some were asked for.
        lengths: tokens that each row holds.
        logits: after each slot's last token, [n_slots, V].
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        weight = model.embedder.token.weight
        self.model, self.device = model, weight.device
        self.kind = config.cache_kind or default_kind(model)
        if self.kind is KVCacheKind.AUTO:
            raise ConfigError(
                "engine: cache_kind=auto is chosen for one generation by measuring it; name a kind, as "
                "`caramba generate --cache-kind auto` reports it"
            )
        n, vocab_size = config.n_slots, model.spec.embedder.vocab_size
        self.not_ahead = self._ahead_refusal(config) if config.n_ahead else None
        self.n_slots, self.n_ahead = n, 0 if self.not_ahead else config.n_ahead
        # Slots at positions of their own, and prefixes that are cut anywhere, index the whole cache: none is windowed.
        self.ctx = model.new_context(n + self.n_ahead, config.max_len, self.kind, static=True)
        self.rows = [self.ctx.row(index) for index in range(n + self.n_ahead)]
        stepped = self.ctx.row(0, n)
        refused = step_refusal(model, stepped, has_slots=True)
        self.step = DeviceContext.slots(stepped) if refused is None else None
        self.form, self.not_compiled = self._choose_form(config, refused)
        self._row_limit = model.row_limit()
        self.prompts: PromptForwards | None = None
        if self.form.endswith("graph") and self.runs_together:
            sizes = sizes_of(config.prefill_chunk, config.max_len, self._row_limit)
            self.prompts = PromptForwards(model, self.ctx, sizes, is_captured=True)
        self.n_weights = n_weights_of(model)
        self.lengths = [0] * len(self.rows)
        self.is_decoding = [False] * len(self.rows)
        self.sampler = SlotSampler(n, config.max_len, vocab_size, self.device)
        self.logits: Tensor | None = None
        self._all_logits: Tensor | None = None  # of the rows ahead too
        self._first: Tensor | None = None  # after the prompts that ran last, [n, V]
        self._run = next_logits
        if self.form.startswith("compiled") and self.step is not None:
            find_angles(model, self.step)
            self._run = compile_logits(model, n, config.max_len, *form_of(model, stepped))
        # Of higher priority than prompts that overlap a step, and so another stream than these were captured on:
        # libraries keep their working memory by stream, and graphs that run at once may not share it.
        is_captured = self.form.endswith("graph")
        self._on = torch.cuda.Stream(self.device, priority=-1) if is_captured else None
        self._next: Captured | None = None
        self._weights: Sequence[Tensor] = ()
        self._places: tuple[int, ...] = ()
        self._draws: dict[Form, Captured] = {}
        self._is_changed = True

    @property
    def runs_together(self) -> bool:
        """Whether several prompts may run in one forward: what they leave is then the same rows of every buffer."""
        return self.step is not None and self.step.packed is None

    def has_shape(self, n_tokens: int) -> bool:
        """Whether a whole prompt of so many tokens runs in a forward of fixed size."""
        return self.prompts is not None and n_tokens <= self.prompts.widest

    def tokens_together(self, n_prompts: int, n_tokens: int, most: int, *, is_first: bool = False) -> int:
        """Return the padded size, at most `most`, of a forward of whole prompts of `n_tokens` in all; 0 if none.

        One prompt that is the first of a step fits all that has a shape.
        """
        if self.prompts is None:
            if self._row_limit is not None:
                most = min(most, self._row_limit)
            return n_tokens if n_tokens <= most else 0
        if is_first and n_prompts == 1:
            most = max(most, WHOLE)
        return self.prompts.size_for(n_prompts, n_tokens, most) or 0

    def prefill(self, slot: int, tokens: Sequence[int], *, is_last: bool) -> None:
        """Run the next tokens of a slot's prompt; those that are its last leave logits to draw from."""
        ctx = self.rows[slot]
        with unplanned_attention(self.device, len(tokens) * (ctx.position + len(tokens))):
            hidden = self.model.hidden(upload([list(tokens)], self.device), ctx)
        self.lengths[slot] = ctx.position
        if is_last:
            self._begin([slot], self.model.logits(hidden[:, -1]))

    @property
    def runs_overlapped(self) -> bool:
        """Whether prompts of `prefill_together` overlap decode steps."""
        return self.prompts is not None

    def launch_next(self) -> bool:
        """Launch the next chunk of the prompts that overlap the steps, if there is one."""
        return self.prompts is not None and self.prompts.launch_next()

    @property
    def are_prompts_done(self) -> bool:
        """Whether the device has run the prompts that it was given last."""
        return self.prompts is None or self.prompts.is_done

    def prefill_together(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> None:
        """Run the whole prompts of empty slots in one forward, packed into one row; they decode after `begin`."""
        forwards = None if self.prompts is None else self._prompt_forwards(slots[0])
        if forwards is not None:
            self._first = forwards.run(slots, prompts)
        else:
            given = upload(pack_prompts(slots, prompts, sum(map(len, prompts)), len(prompts)), self.device)
            self._first = fill_slots(self.model, self.ctx, given, len(prompts))
        for slot, prompt in zip(slots, prompts, strict=True):
            self.lengths[slot] = len(prompt)

    def begin(self, slots: Sequence[int]) -> None:
        """Start decoding the slots of the last `prefill_together`, on the device after their prompts.

        Spare rows wait for a slot to `move` to.
        """
        assert self._first is not None
        if self.prompts is not None:
            self._follow_weights()  # no step may have run since they moved
            self.prompts.wait()
        logits, self._first = self._first, None
        self._begin(slots, logits)

    def _prompt_forwards(self, slot: int) -> PromptForwards | None:
        """Return the forwards of fixed sizes, captured, over a slot that is filled later; None where they cannot be:
        their memory then goes back, and prompts run as they come from now on."""
        assert self.prompts is not None
        self._follow_weights()
        try:
            self.prompts.capture(slot)
        except RuntimeError as error:
            self.prompts = None
            logger.warning(f"engine: forwards over prompts cannot be captured, prompts run without: {error}")
        return self.prompts

    def move(self, row: int, slot: int) -> None:
        """Copy a prefilled spare row's cache, logits and length into a free slot."""
        assert self._all_logits is not None
        memory, into = ([part for cache in self.rows[index].caches for part in cache.memory] for index in (row, slot))
        torch._foreach_copy_(into, memory)  # pyright: ignore[reportPrivateImportUsage]
        self._all_logits[slot].copy_(self._all_logits[row])
        self.lengths[slot] = self.lengths[row]
        self.clear(row)
        self.set_decoding(slot, True)

    def restore(self, slot: int, state: Mapping[str, Tensor]) -> None:
        """Restore a slot from a row's cache state."""
        self.rows[slot].load_state_dict(state)
        self.lengths[slot] = self.rows[slot].position

    def set_decoding(self, slot: int, is_decoding: bool) -> None:
        """Let a slot take part in the next forwards, or no longer."""
        self.is_decoding[slot] = is_decoding
        self._is_changed = True

    def choose(self) -> None:
        """Draw the next token of every decoding slot for the sampler to `read`; what idle slots get means nothing."""
        assert self.logits is not None
        form, sampler = self.sampler.form, self.sampler
        if not self.form.endswith("graph"):
            sampler.choose(self.logits, form)
        else:
            if form not in self._draws:
                trial = sampler.trial()
                self._draws[form] = capture_graph(
                    self.logits,
                    lambda given: sampler.choose(given, form),
                    lambda given: trial.choose(given, form),
                    on=self._on,
                    in_place=True,
                )
            replay_graph(self._draws[form], self.logits)
        sampler.send()

    def top_logprobs(self, slots: Sequence[int], n_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the most likely next tokens of some slots and log softmax(logits) there, the most likely first.

        Shape: int64 and float32 of [len(slots), min(n_tokens, V)].
        """
        assert self.logits is not None
        logits = self.logits.index_select(0, upload(slots, self.device))
        values, tokens = logits.float().log_softmax(-1).topk(min(n_tokens, logits.shape[-1]), dim=-1)
        return tokens, values

    def forward(self) -> Mapping[int, Exception]:
        """Run the sampled tokens of the decoding slots, and return what failed, by slot."""
        decoding = [slot for slot, is_decoding in enumerate(self.is_decoding) if is_decoding]
        if self.step is None:
            return self._forward_one_by_one(decoding)
        try:
            if self.step.packed is not None:  # a full tail becomes blocks before the next token goes into it
                packed = [self.rows[slot].pack(self.lengths[slot]) for slot in decoding]
                self._is_changed = self._is_changed or any(packed)
            if self._is_changed:
                self._hold(self.step)
            self._is_changed = False
            self._forward(self.step, max(self.lengths[slot] for slot in decoding) + 1)
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
        if slot < self.n_slots:
            self.sampler.release(slot)
        if self._all_logits is not None:
            self._all_logits[slot] = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the cache."""
        return self.ctx.nbytes()

    def row(self, slot: int) -> Context:
        """Return a slot's own context, which counts all tokens that the slot holds."""
        ctx, n_tokens = self.rows[slot], self.lengths[slot]
        for cache in ctx.caches:
            if cache.n_tokens < n_tokens:  # steps on the device count there alone
                cache.advance(n_tokens - cache.n_tokens)
        ctx.position = n_tokens
        return ctx

    def _choose_form(self, config: EngineConfig, refused: str | None) -> tuple[DecodeForm | str, str | None]:
        if refused is not None:
            return "rows", refused
        return resolve_form(config.compiled, self.device)

    def _ahead_refusal(self, config: EngineConfig) -> str | None:
        """Return why prompts cannot run whole ahead of a free slot, None where they can: in captured forwards, which
        nothing kept goes into."""
        if self.device.type != "cuda":
            return f"prompts are captured on CUDA alone, the model is on {self.device.type}"
        form, reason = resolve_form(config.compiled, self.device)
        if form == "eager":
            return reason or "compiled=false captures no prompts"
        if self.kind not in EXACT_KINDS:
            return f"prompts do not run together into a {self.kind} cache"
        if config.prefix_cache_bytes:
            return "prefix_cache_bytes fills slots with what was kept"
        probe = self.model.new_context(1, 1, self.kind, static=True)
        return step_refusal(self.model, probe, has_slots=True)

    def _begin(self, slots: Sequence[int], logits: Tensor) -> None:
        """Let slots decode from these logits, [n, V], which those of rows ahead wait with."""
        if self._all_logits is None:
            self._all_logits = logits.new_zeros(len(self.rows), logits.shape[-1])
            self.logits = self._all_logits[: self.n_slots]
        self._all_logits.index_copy_(0, upload(slots, self.device), logits)
        for slot in slots:
            if slot < self.n_slots:
                self.set_decoding(slot, True)

    def _hold(self, step: DeviceContext) -> None:
        slots = range(self.n_slots)
        lengths = [self.lengths[slot] if self.is_decoding[slot] else IDLE for slot in slots]
        packed = None if step.packed is None else [row.caches[0].n_packed or 0 for row in self.rows[: self.n_slots]]
        step.set_lengths(lengths, packed)

    def _forward(self, step: DeviceContext, longest: int) -> None:
        def run(token: Tensor) -> Tensor:
            assert self.logits is not None
            return self.logits.copy_(self._run(self.model, token, step))

        def trial(token: Tensor) -> Tensor:
            self._hold(step)  # at the same place each time: the run that counts writes the same there
            return run(token)

        if self.form == "eager":
            step.visible = min(-(-longest // ROUND) * ROUND, step.limit)
        if not self.form.endswith("graph"):
            with unplanned_attention(self.device, self.n_slots * longest):
                run(self.sampler.token)
            return
        self._follow_weights()
        if self._next is None:
            self._next = capture_graph(self.sampler.token, run, trial, on=self._on, in_place=True)
            self._hold(step)
        replay_graph(self._next, self.sampler.token)

    def _follow_weights(self) -> None:
        """Drop the graphs of forwards whose weights have moved: they would read the old memory.

        They do when a generation on the same model, or the engine's thread, lays them side by side.
        """
        if self._weights and addresses(self._weights) == self._places:
            return
        self._next = None
        if self.prompts is not None:
            self.prompts.forget()
        self._weights = tuple(self.model.parameters())
        self._places = addresses(self._weights)

    def _forward_one_by_one(self, decoding: Sequence[int]) -> Mapping[int, Exception]:
        assert self.logits is not None
        failed: dict[int, Exception] = {}
        for slot in decoding:
            try:
                self.logits[slot] = decode_step(self.model, self.sampler.token[slot : slot + 1], self.rows[slot])[0]
                self.lengths[slot] += 1
            except Exception as error:
                failed[slot] = error
        return failed
