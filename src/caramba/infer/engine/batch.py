"""The requests that have a slot: their prompts in chunks, their draws, their end, and counts of them."""

import math
import time
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from caramba.config.generate import EngineConfig, GenerateConfig
from caramba.config.kvcache import EXACT_KINDS
from caramba.config.topology import memory_window
from caramba.errors import ConfigError
from caramba.infer.device_steps import DecodeForm, step_threads
from caramba.infer.engine.prefix import MIN_TOKENS, PrefixCache, SnapshotCache
from caramba.infer.engine.prompts import MOST, WHOLE
from caramba.infer.engine.request_handle import ENDS, Alternatives, Event, FinishReason, RequestHandle
from caramba.infer.engine.slots import Slots
from caramba.infer.row import GenerationRow
from caramba.model import Model
from caramba.model.memory import STATISTICS


@dataclass
class EngineStats:
    """Counts since the engine was made; `active`, `ahead`, `queued` and the bytes are of this moment.

    Attributes:
        prefilled_tokens: prompt tokens that ran through the model; `prefix_tokens` did not have to.
        steps: draws for all decoding rows at once.
        prefix_hits: requests whose beginning was taken from an earlier one.
        cache_bytes: of all slots and rows ahead, allocated; `prefix_bytes` come besides.
        decode: how steps run, see `GenerateConfig.compiled`; `rows` one row after the other.
        not_compiled: why they run otherwise than asked, if so.
        active: requests in slots; `ahead` those in rows ahead of them, of which there are `n_ahead`.
        not_ahead: why there are none of these, if some were asked for.
        memory: use of memory slots in a text that has ended, see `Model.get_memory_stats`; NaN before the first such
            text, None for a model without slots.
    """

    n_slots: int = 0
    n_ahead: int = 0
    active: int = 0
    ahead: int = 0
    queued: int = 0
    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prefilled_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    prefix_bytes: int = 0
    cache_bytes: int = 0
    cache_kind: str = ""
    decode: DecodeForm | str = "eager"
    not_compiled: str | None = None
    not_ahead: str | None = None
    memory: dict[str, float] | None = None


RATE_OVER = 32
MAX_PREFILL_DELAY_STEPS = 4
"""Steps that new prompts wait for others to run with, while more requests queue up than there are slots, by `WHOLE`
tokens of `prefill_chunk`: a forward of twice the tokens takes as many steps to fill."""
MAX_OVERLAP_STEPS = 2
"""Decode steps that prompts may overlap, with their last chunk, before the next step waits for them.

With 3, slots were idle longer, and an H200 made 2% fewer tokens a second. Prompts in a step's own forward, which read
the weights once for both, reached the same throughput and a longer p99 between two tokens (3.7 ms, overlapped 2.9).
"""
MIN_PREFILLED = 1
"""Requests that have run ahead of a slot with which the next ones wait no longer for others: a slot or two get free
while their prompts run."""
MEASURED_EVERY = 32
"""Of so many texts that leave the window of a model with memory slots, the use of its slots is measured on one."""
FULL = 0.7
"""Part of `prefill_chunk` with which prompts wait no longer: a forward of few tokens takes long for each of them."""


@dataclass
class EngineRequest:
    """A ticket, its settings, the alternatives per token, the tokens of its prompt that have run, and when it came."""

    ticket: RequestHandle
    config: GenerateConfig
    n_alternatives: int = 0
    done: int = 0
    came_s: float = field(default_factory=time.monotonic)

    @property
    def row(self) -> GenerationRow:
        """The prompt and what has followed it."""
        return self.ticket.row


class Batch:
    """What is in the slots. One thread works it; the engine holds what waits.

    Attributes:
        requests: of every slot and then of every row ahead, None where it is free.
        stats: the engine's counts.
    """

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.config = config
        self.slots = Slots(model, config)
        self.prefixes = self._prefix_cache()
        self.requests: list[EngineRequest | None] = [None] * (config.n_slots + self.slots.n_ahead)
        window = memory_window(model.spec.topology)
        self.stats = EngineStats(
            n_slots=config.n_slots,
            n_ahead=self.slots.n_ahead,
            not_ahead=self.slots.not_ahead,
            cache_kind=self.slots.kind.value,
            memory=dict.fromkeys(STATISTICS, math.nan) if window is not None else None,
        )
        self._window = window or 0  # of memory slots
        self._n_beyond = 0  # texts that have left it
        self._order: list[int] = []  # slots whose prompt still runs, the earliest first
        self._overlapping: list[int] = []  # slots whose prompts overlap decode steps, whole
        self._ahead: list[int] = []  # rows ahead whose prompts have run, the earliest first
        self._n_waited = 0  # steps, of prompts that have not begun
        self._n_overlapped = 0  # steps launched since the prompts that overlap them
        self._max_delay = MAX_PREFILL_DELAY_STEPS * max(1, min(config.prefill_chunk, MOST) // WHOLE)
        self._ended: deque[float] = deque(maxlen=RATE_OVER)

    @property
    def n_active(self) -> int:
        """Slots and rows ahead that are taken."""
        return sum(request is not None for request in self.requests)

    @property
    def n_used_slots(self) -> int:
        """Slots that are taken."""
        return sum(request is not None for request in self.requests[: self.config.n_slots])

    @property
    def n_free(self) -> int:
        """Requests that may come in before one waits."""
        return len(self.requests) - self.n_active

    def find_free_slot(self, request: EngineRequest) -> int | None:
        """Return a free slot that no prefilled request needs, else a free spare row that fits the prompt."""
        n_slots = self.config.n_slots
        slots, ahead = self.requests[:n_slots], self.requests[n_slots:]
        if slots.count(None) > len(ahead) - ahead.count(None):
            return slots.index(None)
        if None in ahead and self.slots.has_shape(len(request.row.prompt)):
            return n_slots + ahead.index(None)
        return None

    def place(self, request: EngineRequest, slot: int) -> None:
        """Give a request a slot or row."""
        self.requests[slot] = request
        self._order.append(slot)

    def drop_cancelled(self) -> None:
        """Free the slots of requests that were cancelled."""
        for slot, request in enumerate(self.requests):
            if request is not None and request.ticket.is_cancelled:
                self.release(slot, "cancelled")

    def reuse(self, slot: int, request: EngineRequest) -> None:
        """Restore the cached prefix of an earlier request with the same first tokens."""
        found = None if self.prefixes is None else self.prefixes.match(request.row.prompt)
        if found is None:
            return
        try:
            self.slots.restore(slot, found[1])
        except Exception as error:
            self.release(slot, "error", error)
            return
        request.done = found[0]
        self.stats.prefix_hits += 1
        self.stats.prefix_tokens += found[0]

    def _keep(self, slot: int) -> None:
        if self.prefixes is None:
            return
        row, n_held = self._row(slot), self.slots.lengths[slot]
        text = (*row.prompt, *row.tokens)[:n_held]  # an end mark has run, and is left out
        self._keep_text(self.prefixes, slot, text)

    def _keep_text(self, prefixes: PrefixCache, slot: int, text: Sequence[int]) -> None:
        """Keep what a slot holds after a text that it has run."""
        if len(text) >= MIN_TOKENS and not prefixes.has(text):
            ctx = self.slots.row(slot)
            if ctx.used_bytes() <= prefixes.limit_bytes:
                ctx.truncate(len(text))
                prefixes.put(text, ctx.state_dict())

    def prefill(self, *, is_queueing: bool = False) -> None:
        """Run up to `prefill_chunk` tokens of prompts, the earliest first.

        While others decode and more requests wait for slots (`is_queueing`), few new tokens wait some steps, see
        `MAX_PREFILL_DELAY_STEPS`, for prompts of the next free slots; with spare rows, until few have run there.

        Whole prompts overlap the next steps where a device can, one chunk a step, for up to `MAX_OVERLAP_STEPS`
        steps or as long as all slots decode. They decode once they have run; until then no other prompts are launched.

        One that comes first in a step runs whole beyond the chunk where it has a captured shape: up to 512 tokens, with
        an exact cache, and where none of them was kept of an earlier text.
        """
        if self._run_on():
            return
        self._join()
        if is_queueing and self._waits():
            self._n_waited += 1
            return
        self._n_waited = 0
        left = self.config.prefill_chunk
        while n_tokens := self._prefill_together(left):
            left -= n_tokens
        for slot in list(self._order):
            request = self.requests[slot]
            assert request is not None
            # What has a shape runs whole, in a later step if need be.
            if left <= 0 or (not request.done and self.slots.has_shape(len(request.row.prompt))):
                return
            # What a quantised cache has rounded depends on the chunks: they are then those of the prompt alone.
            size = left if self.slots.kind in EXACT_KINDS else self.config.prefill_chunk
            part = request.row.prompt[request.done : request.done + size]
            is_last = request.done + len(part) == len(request.row.prompt)
            try:
                self.slots.prefill(slot, part, is_last=is_last)
                if isinstance(self.prefixes, SnapshotCache):
                    self._keep_text(self.prefixes, slot, request.row.prompt[: request.done + len(part)])
                if is_last:
                    self._has_run(slot)
            except Exception as error:
                self.release(slot, "error", error)
                continue
            request.done += len(part)
            self.stats.prefilled_tokens += len(part)
            left -= len(part)
            if is_last:
                self._order.remove(slot)

    def _waits(self) -> bool:
        """Whether the prompts that are there are few, new, and have not waited long for others to run with."""
        if not (self.slots.runs_together and self._order and any(self.slots.is_decoding)):
            return False
        waiting = [request for slot in self._order if (request := self.requests[slot]) is not None]
        n_tokens = sum(len(request.row.prompt) for request in waiting)
        is_new = not any(request.done for request in waiting)
        if not is_new or n_tokens >= FULL * min(self.config.prefill_chunk, MOST):
            return False
        if self.slots.n_ahead:
            return len(self._ahead) > MIN_PREFILLED
        return self._n_waited < self._max_delay

    def _prefill_together(self, left: int) -> int:
        """Run the earliest prompts in one forward where they are new and fit together; return its tokens."""
        group, n_taken, n_tokens = list[int](), 0, 0
        is_first = left == self.config.prefill_chunk
        for slot in self._order if self.slots.runs_together else ():
            request = self.requests[slot]
            assert request is not None
            if request.done:
                break
            in_all = n_taken + len(request.row.prompt)
            fitting = self.slots.tokens_together(len(group) + 1, in_all, left, is_first=is_first)
            if not fitting:
                break
            group.append(slot)
            n_taken, n_tokens = in_all, fitting
        if len(group) < 2 and not (group and self.slots.has_shape(n_taken)):
            return 0
        taken = [request for slot in group if (request := self.requests[slot]) is not None]
        try:
            self._join()  # what the last forward left is overwritten
            self.slots.prefill_together(group, [request.row.prompt for request in taken])
        except Exception as error:
            for slot in group:
                self.release(slot, "error", error)
            return n_tokens
        for slot, request in zip(group, taken, strict=True):
            request.done = len(request.row.prompt)
            self._order.remove(slot)
            self.stats.prefilled_tokens += request.done
        self._overlapping, self._n_overlapped = group, 0
        if not (self.slots.runs_overlapped and any(self.slots.is_decoding)):
            self._join()
        self._hurry()
        return n_tokens

    def _hurry(self) -> None:
        """Launch all pieces where more requests wait than decode, as when a server starts or most have ended."""
        n_waiting = len(self._overlapping) + len(self._order)
        while n_waiting > sum(self.slots.is_decoding) and self.slots.launch_next():
            pass

    def _run_on(self) -> bool:
        """Whether the launched prompts overlap the next step too: always while chunks remain, or all slots decode."""
        if not self._overlapping or self.slots.are_prompts_done or not any(self.slots.is_decoding):
            return False
        self._n_overlapped += 1
        self._hurry()
        if self.slots.launch_next():
            return True
        is_idle = not all(self.slots.is_decoding[: self.config.n_slots])
        return self._n_overlapped < MAX_OVERLAP_STEPS or not is_idle

    def _join(self) -> None:
        """Let the slots whose prompts have been launched decode, once these have run."""
        group, self._overlapping = self._overlapping, []
        if not group:
            return
        try:
            self.slots.begin(group)
            for slot in group:
                self._has_run(slot)
        except Exception as error:
            for slot in group:
                self.release(slot, "error", error)

    def _has_run(self, slot: int) -> None:
        """Let a slot whose prompt has run decode: from here on each step draws for it; a row ahead waits for a slot."""
        if slot >= self.config.n_slots:
            self._ahead.append(slot)
            return
        request = self.requests[slot]
        assert request is not None
        self.slots.sampler.admit(slot, request.row.prompt, request.row.seed, request.config)
        self._keep(slot)

    def assign_slots(self) -> None:
        """Give free slots to the requests whose prompts have run ahead, the earliest first."""
        while self._ahead and None in self.requests[: self.config.n_slots]:
            row, slot = self._ahead.pop(0), self.requests.index(None)
            self.requests[slot], self.requests[row] = self.requests[row], None
            try:
                self.slots.move(row, slot)
                self._has_run(slot)
            except Exception as error:
                self.release(slot, "error", error)

    def decode(self) -> None:
        """Sample a token of every decoding slot, start the forward of unfinished ones, and meanwhile emit tokens."""
        decoding = [slot for slot, is_decoding in enumerate(self.slots.is_decoding) if is_decoding]
        if not decoding:
            return
        try:
            with step_threads(self.slots.model, len(self.requests), self.slots.n_weights):
                self.slots.choose()
                asked = self._alternatives_asked(decoding)
                top = None
                if asked:  # before the forward, which overwrites the logits
                    top = self.slots.top_logprobs(list(asked), max(asked.values()))
                for slot in decoding:
                    row = self._row(slot)
                    if len(row.tokens) + 1 == row.max_new_tokens:  # its last token is never run
                        self.slots.set_decoding(slot, False)
                failed = self.slots.forward() if any(self.slots.is_decoding) else {}
                self.stats.steps += 1
                tokens, logprobs = self.slots.sampler.read()
                alternatives = {} if top is None else _alternatives(asked, *top)
        except Exception as error:
            for slot in decoding:
                self.release(slot, "error", error)
            return
        for slot in decoding:
            event = Event(tokens[slot], logprobs[slot], alternatives=alternatives.get(slot, ()))
            self._hand_out(slot, event, failed.get(slot))

    def _alternatives_asked(self, slots: Sequence[int]) -> dict[int, int]:
        requests = self.requests
        return {
            slot: request.n_alternatives
            for slot in slots
            if (request := requests[slot]) is not None and request.n_alternatives
        }

    def _hand_out(self, slot: int, event: Event, failure: Exception | None) -> None:
        """Give a request its token, and let it go where that was its last or its forward failed."""
        request = self.requests[slot]
        assert request is not None
        row, ticket = request.row, request.ticket
        try:
            n_before = len(row.tokens)
            assert event.token is not None
            assert event.logprob is not None
            row.take([event.token], [event.logprob], None)
            if len(row.tokens) > n_before:
                self.stats.new_tokens += 1
                ticket.put(event)
            if row.finish is not None:
                row.close(None)
                self._keep(slot)
                self._measure_slots((*row.prompt, *row.tokens))
        except Exception as error:
            self.release(slot, "error", error)
            return
        if row.finish is not None:
            self.release(slot, ENDS[row.finish])
        elif failure is not None:
            self.release(slot, "error", failure)

    def _measure_slots(self, text: Sequence[int]) -> None:
        """Measure on some texts, the first one among them, how memory slots are used; in a forward not much longer than
        a chunk of a prompt, for which the other rows wait."""
        if self.stats.memory is None or len(text) <= self._window:
            return
        if self._n_beyond % MEASURED_EVERY == 0:
            tokens = torch.tensor([text[: self._window + self.config.prefill_chunk]], device=self.slots.device)
            found = self.slots.model.get_memory_stats(tokens)
            self.stats.memory = {key: found[key] for key in STATISTICS}
        self._n_beyond += 1

    def release(self, slot: int, reason: FinishReason, error: BaseException | None = None) -> None:
        """End a slot's request and overwrite what the slot holds; the request ends even where that fails."""
        if slot in self._overlapping:
            self._join()  # no other request may take the slot while its prompt runs
        request = self.requests[slot]
        if request is None:  # it could not begin to decode, which has ended it
            return
        try:
            self.slots.clear(slot)
        finally:
            for rows in (self._order, self._ahead):
                if slot in rows:
                    rows.remove(slot)
            self.requests[slot] = None
            self.finish(request, reason, error)

    def finish(self, request: EngineRequest, reason: FinishReason, error: BaseException | None = None) -> None:
        """Tell a request its end, whether it had a slot or not."""
        counted = {"cancelled": "cancelled", "error": "failed"}.get(reason, "finished")
        setattr(self.stats, counted, getattr(self.stats, counted) + 1)
        self._ended.append(time.monotonic())
        if error is not None:  # it would keep the activations of the forward that it left
            traceback.clear_frames(error.__traceback__)
        request.ticket.error = error
        try:
            request.ticket.put(Event(finish_reason=reason))
        except Exception as failure:
            # Raised by its on_event: the request has ended, and its caller gets the error.
            request.ticket.error = request.ticket.error or failure

    def seconds_per_request(self) -> float:
        """Return the time in which a request ends, by those that ended last; 1 where that is not known."""
        if len(self._ended) < 2:
            return 1.0
        return (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)

    def _row(self, slot: int) -> GenerationRow:
        request = self.requests[slot]
        assert request is not None
        return request.row

    def _prefix_cache(self) -> PrefixCache | None:
        is_cut = all(cache.cuts_anywhere for cache in self.slots.ctx.caches)
        if self.config.use_memory_cache:
            if is_cut:
                raise ConfigError(
                    "engine: use_memory_cache keeps states of memory slots, and this model has none; use "
                    "prefix_cache_bytes, which reuses any prefix of a text"
                )
            if self.config.prefix_cache_bytes:
                raise ConfigError(
                    "engine: use_memory_cache and prefix_cache_bytes keep the same texts; leave prefix_cache_bytes at 0"
                )
            return SnapshotCache(int(self.config.cache_size * 1e6))
        if not self.config.prefix_cache_bytes:
            return None
        if self.slots.kind not in EXACT_KINDS:
            raise ConfigError(
                f"engine: prefix_cache_bytes with cache_kind={self.slots.kind}: which tokens a quantised cache has "
                "rounded depends on the length that it had, so a text would depend on what was asked before it; use "
                f"one of {', '.join(EXACT_KINDS)}, or leave it at 0"
            )
        if not is_cut:
            raise ConfigError(
                "engine: prefix_cache_bytes reuses any prefix of a text, and memory slots have no state of a prefix; "
                "leave it at 0 and use use_memory_cache"
            )
        return PrefixCache(self.config.prefix_cache_bytes)


def _alternatives(asked: Mapping[int, int], tokens: Tensor, logprobs: Tensor) -> dict[int, Alternatives]:
    """Return slot -> its most likely tokens, as many as it asked for. Shape: tokens and logprobs [slots, K]."""
    rows = zip(asked.items(), tokens.tolist(), logprobs.tolist(), strict=True)
    return {
        slot: tuple(
            (token, logprob)
            for token, logprob in zip(ids[:n], values[:n], strict=True)
            if math.isfinite(logprob)  # a token that the model excludes is no alternative
        )
        for (slot, n), ids, values in rows
    }
