"""The engine: requests wait, take a slot, run their prompt in chunks, decode together, and leave."""

import dataclasses
import gc
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from caramba.config.cache_policy import CacheKeys
from caramba.config.generate import EngineConfig, GenerateConfig
from caramba.config.parse import parse_as
from caramba.data import Tokenizer
from caramba.errors import ConfigError, EngineClosed, QueueFull
from caramba.infer.engine.batch import Batch, EngineRequest, EngineStats
from caramba.infer.engine.request_handle import FinishReason, OnEvent, RequestHandle
from caramba.infer.prompts import refuse_prompts
from caramba.infer.ragged import device_of
from caramba.infer.row import GenerationRow
from caramba.lower.lowering import lower
from caramba.model import Model

_lock = threading.Lock()
_engines = 0
_was_empty = False


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Run gc.collect and gc.freeze; unfreeze after the last block, unless frozen before the first.

    Blocks may overlap, each in its own thread.
    """
    global _engines, _was_empty
    with _lock:
        if _engines == 0:
            _was_empty = gc.get_freeze_count() == 0
        _engines += 1
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _engines -= 1
            if _engines == 0 and _was_empty:
                gc.unfreeze()


OF_THE_ENGINE = (*CacheKeys.model_fields, "prefill_chunk", "read_every", "compiled")


class Engine:
    """Continuous batching of one model, in eval mode. A request gets the tokens that `generate` gives for its seed and
    settings alone, whatever else is in flight; in a quantised cache, that `generate` gives with `max_seq_len` as long
    as a slot, since a shorter cache may keep all of its tokens in 16 bits.

    `step` does everything: it frees slots of cancelled requests, draws a token and runs a forward of all decoding
    slots, gives free slots to those that wait, and runs up to `prefill_chunk` tokens of their prompts; with captured
    steps, an exact cache and nothing kept of it, a prompt of up to 512 tokens runs whole, overlaps the next steps, and
    while requests queue up few tokens wait some steps for others to run with. With `n_ahead` the prompts of requests
    that wait for a slot run meanwhile, and continue in the next free one. Call it until it returns False,
    or let `start` do so in a thread; `submit`, `cancel` and `stats` may come from any thread. What fails ends the
    requests that it was for, with the error on their tickets; a slot is overwritten before another takes it.

    Args:
        tokenizer: gives the end mark where neither `eos_token_id` nor a request does, and is needed for stop texts.
        eos_token_id: ends every request that does not say otherwise.
        values: keys of EngineConfig by name.

    Raises:
        ConfigError: a value out of range, slots longer than the model's positions, or cache_kind=auto.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_id: int | tuple[int, ...] | None = None,
        **values: Any,
    ) -> None:
        given = {} if config is None else config.model_dump(exclude_unset=True)
        self.config = parse_as(EngineConfig, given | values)
        limit = model.spec.embedder.max_positions
        if limit is not None and self.config.max_len > limit:
            raise ConfigError(
                f"engine: max_len={self.config.max_len} exceeds the {limit} positions that the model has; lower max_len"
            )
        self.model, self.tokenizer = model.eval(), tokenizer
        self.eos_ids = self._eos_ids(eos_token_id)
        self.batch = Batch(model, self.config)
        self._queue: deque[EngineRequest] = deque()
        self._news = threading.Condition()
        self._stepping = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = self._is_draining = False
        self._has_cancelled = False  # since the queue was last read
        self._failure: Exception | None = None

    def submit(
        self,
        prompt_ids: Sequence[int],
        config: GenerateConfig | None = None,
        *,
        on_event: OnEvent | None = None,
        n_alternatives: int = 0,
        **values: Any,
    ) -> RequestHandle:
        """Queue a request, by a GenerateConfig or its keys by name; `config.seed` is its row's seed.

        With `n_alternatives` every event of a token holds that many of the most likely tokens and their
        log-probabilities, which are log softmax(logits) before penalty, temperature and filters.

        Raises:
            ConfigError: an empty or too long prompt, a token outside the vocabulary, a key of the engine, or stop
            texts without a tokenizer.
            QueueFull: `max_queue` requests wait already.
            EngineClosed: after `close`.
        """
        settings = parse_as(GenerateConfig, ({} if config is None else config.model_dump(exclude_unset=True)) | values)
        prompt = [int(token) for token in prompt_ids]
        self._refuse(prompt, settings)
        eos_ids = self.eos_ids if settings.eos_token_id is None else settings.eos_ids
        # Text is needed to find where it stops; other callers decode the tokens.
        (row,) = GenerationRow.of([prompt], settings, eos_ids, self.tokenizer if settings.stop else None, None)
        ticket = RequestHandle(row, on_event, self._wake)
        with self._news:
            if self._is_closed or self._is_draining:
                why = "" if self._failure is None else f" by a failure: {self._failure}"
                raise EngineClosed(f"engine: closed{why}; no request is taken any more")
            if len(self._queue) >= self.config.max_queue + self.batch.n_free:
                self.batch.stats.refused += 1
                raise QueueFull(
                    f"engine: {len(self._queue)} requests wait, as many as max_queue={self.config.max_queue} allows; "
                    "try again later",
                    max(1.0, self.batch.seconds_per_request()),
                )
            self.batch.stats.submitted += 1
            self._queue.append(EngineRequest(ticket, settings, n_alternatives))
            self._news.notify_all()
        return ticket

    def step(self) -> bool:
        """Do one round and return whether anything is left to do."""
        with self._stepping, torch.inference_mode():
            self._drop_waiting()
            self.batch.drop_cancelled()
            # Prompts are launched while the device still runs the forward of the rows that decode.
            self.batch.decode()
            self.batch.assign_slots()
            self._admit()
            with self._news:
                is_queueing = bool(self._queue)
            self.batch.prefill(is_queueing=is_queueing)
            self.batch.assign_slots()
        return not self._is_idle()

    def start(self) -> "Engine":
        """Step in a thread of its own, which sleeps while there is nothing to do.

        Python's collector leaves what there is when it begins alone until it ends.
        """
        with self._news:
            if self._is_closed:
                raise EngineClosed("engine: closed, make another")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
                self._thread.start()
        return self

    def close(self, *, drain: bool = False) -> None:
        """Take no more requests, end those that there are (`drain` finishes them first) and stop the thread."""
        with self._news:
            self._is_draining, self._is_closed = True, self._is_closed or not drain
            self._news.notify_all()
        if self._thread is not None:
            self._thread.join()
        elif drain:
            while self.step():
                pass
        with self._news:
            self._is_closed = True
        with self._stepping, torch.inference_mode():
            self._end_all("cancelled", None)

    @property
    def failure(self) -> Exception | None:
        """What ended the engine, or keeps it from giving slots out again, where it was no request's own."""
        return self._failure

    def stats(self) -> EngineStats:
        """Return a copy of the counts."""
        with self._news:
            return dataclasses.replace(
                self.batch.stats,
                active=self.batch.n_used_slots,
                ahead=self.batch.n_active - self.batch.n_used_slots,
                queued=len(self._queue),
                cache_bytes=self.batch.slots.nbytes,
                decode=self.batch.slots.form,
                prefix_bytes=0 if self.batch.prefixes is None else self.batch.prefixes.nbytes,
                not_compiled=self.batch.slots.not_compiled,
            )

    def __enter__(self) -> "Engine":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _refuse(self, prompt: list[int], config: GenerateConfig) -> None:
        wrong = sorted(config.model_fields_set.intersection(OF_THE_ENGINE))
        if wrong:
            raise ConfigError(
                f"engine: {wrong[0]} is the same for all requests; give it to EngineConfig, or leave it out"
            )
        if not prompt:
            raise ConfigError("engine: the prompt is empty; give at least one token")
        refuse_prompts(
            [prompt],
            vocab_size=self.model.spec.embedder.vocab_size,
            max_new_tokens=config.max_new_tokens,
            limit=config.max_seq_len,
        )
        if len(prompt) + config.max_new_tokens > self.config.max_len:
            raise ConfigError(
                f"engine: the prompt's {len(prompt)} tokens and max_new_tokens={config.max_new_tokens} exceed the "
                f"{self.config.max_len} tokens of a slot; shorten them, or make the engine with a larger max_len"
            )

    def _eos_ids(self, given: int | tuple[int, ...] | None) -> tuple[int, ...]:
        if given is not None:
            return (given,) if isinstance(given, int) else tuple(given)
        return () if self.tokenizer is None else (self.tokenizer.eos_id,)

    def _gather(self) -> None:
        """Where nothing runs, wait for more requests to begin with, `batch_timeout` seconds from the first on at most.

        Rows that decode already are joined by others at every step, so then nobody waits.
        """
        while self.config.batch_timeout > 0 and not self.batch.n_active:
            with self._stepping, torch.inference_mode():
                self._drop_waiting()
            with self._news:
                is_ending = self._is_closed or self._is_draining
                if is_ending or not 0 < len(self._queue) < self.config.n_slots:
                    return
                left = self._queue[0].came_s + self.config.batch_timeout - time.monotonic()
                if left <= 0:
                    return
                if not any(request.ticket.is_cancelled for request in self._queue):
                    self._news.wait(left)

    def _drop_waiting(self) -> None:
        with self._news:
            if not self._has_cancelled:
                return
            self._has_cancelled = False
            gone = [request for request in self._queue if request.ticket.is_cancelled]
            for request in gone:
                self._queue.remove(request)
        for request in gone:
            self.batch.finish(request, "cancelled")

    def _admit(self) -> None:
        while True:
            with self._news:
                slot = self.batch.find_free_slot(self._queue[0]) if self._queue else None
                if slot is None:
                    return
                request = self._queue.popleft()
                self.batch.place(request, slot)
            self.batch.reuse(slot, request)

    def _end_all(self, reason: FinishReason, error: BaseException | None) -> None:
        for slot, request in enumerate(self.batch.requests):
            if request is not None:
                try:
                    self.batch.release(slot, reason, error)
                except Exception as failure:  # the request has ended; the next caller gets the error
                    self._failure = failure
        while self._queue:
            self.batch.finish(self._queue.popleft(), reason, error)

    def _is_idle(self) -> bool:
        with self._news:
            return not self._queue and not self.batch.n_active

    def _wake(self) -> None:
        """Look through the queue: a ticket was cancelled."""
        with self._news:
            self._has_cancelled = True
            self._news.notify_all()

    def _run(self) -> None:
        slots = self.batch.slots
        is_compiled = slots.form.startswith("compiled")
        with lower(slots.model, device_of(slots.model), "decode", is_compiled=is_compiled), gc_frozen():
            self._work()

    def _work(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._is_closed or self._is_draining or not self._is_idle())
                if self._is_closed or (self._is_draining and self._is_idle()):
                    return
            try:
                self._gather()
                if self._is_closed:  # while they waited for others: what has not begun does not begin
                    return
                self.step()
            except Exception as error:
                # Not of one request: a slot that cannot be cleared is given to nobody, and nobody waits for it forever.
                with self._news:
                    self._failure, self._is_closed = error, True
                with self._stepping, torch.inference_mode():
                    self._end_all("error", error)
