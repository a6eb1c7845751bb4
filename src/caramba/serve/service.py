"""The served model: encodes prompts, checks requests against its limits, and submits them to the engine."""

import asyncio
import functools
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakSet

from caramba.data import Tokenizer
from caramba.errors import ConfigError
from caramba.infer.dialogue import Dialogue
from caramba.infer.engine import Engine, EngineClosed, QueueFull
from caramba.infer.prompts import encode_prompts
from caramba.serve.failure import ApiError, queue_full, stopping
from caramba.serve.metrics import Metrics
from caramba.serve.running import ActiveRequest, EventQueue
from caramba.serve.schema import ChatRequest, CompletionRequest, Health, ModelCard, SamplingRequest

MOST_TEXTS = 1 << 16
"""Tokens whose text is kept: with alternatives a request needs that of 20 tokens a step."""


@dataclass(frozen=True)
class Limits:
    """What one request may take."""

    max_tokens: int
    request_bytes: int
    timeout_s: float


class Service:
    """One model, its engine, and all that runs in it."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, name: str, limits: Limits, *, template: str | None = None
    ) -> None:
        self.engine, self.tokenizer, self.name, self.limits = engine, tokenizer, name, limits
        self._text_of = functools.lru_cache(MOST_TEXTS)(self._decoded)
        self.dialogue = Dialogue(tokenizer, template)
        self.metrics = Metrics(engine.stats)
        self.created = int(time.time())
        self.is_stopping = False
        self._refused: EngineClosed | None = None
        self._event_queue: EventQueue | None = None
        self._running: WeakSet[ActiveRequest] = WeakSet()

    @property
    def failure(self) -> EngineClosed | None:
        """The error that ended the engine, or a refusal by a closed engine; the server ends with it."""
        error = self.engine.failure
        if self._refused is None and error is not None:
            return EngineClosed(f"engine: closed by a failure: {error}")
        return self._refused

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer."""
        return self.engine.config.max_len

    @property
    def vocab_size(self) -> int:
        """Tokens that a prompt may hold are below it."""
        return self.engine.model.spec.embedder.vocab_size

    @property
    def card(self) -> ModelCard:
        """The model as the interface lists it."""
        return ModelCard(id=self.name, created=self.created, max_model_len=self.context)

    def health(self) -> Health:
        """Return whether requests are taken, and how many there are."""
        stats = self.engine.stats()
        status = "failed" if self.failure else "stopping" if self.is_stopping else "ok"
        return Health(status=status, active=stats.active, queued=stats.queued)

    async def complete(self, request: CompletionRequest) -> ActiveRequest:
        """Submit a text.

        Raises:
            ApiError: it cannot be taken, or not now.
        """
        self._refuse_model(request)
        prompt = request.prompt
        ids = await self._encode("prompt", lambda: encode_prompts([prompt], self.tokenizer)[0])
        # The usual number is asked for by nobody: a server that gives fewer gives those.
        is_asked = "max_tokens" in request.model_fields_set
        n_new = request.max_tokens if is_asked else min(request.max_tokens, self.limits.max_tokens)
        return self._submit(request, ids, n_new, "max_tokens", request.stops, request.n_alternatives)

    async def answer(self, request: ChatRequest) -> ActiveRequest:
        """Submit a conversation.

        Raises:
            ApiError: it cannot be taken, or not now.
        """
        self._refuse_model(request)
        if None not in (request.max_tokens, request.max_completion_tokens):
            raise ApiError(400, "max_tokens and max_completion_tokens are one key; give one", param="max_tokens")
        if request.top_logprobs and not request.logprobs:
            raise ApiError(
                400,
                f"top_logprobs is {request.top_logprobs} and logprobs is false; set logprobs to true",
                param="top_logprobs",
            )
        # OpenAI's clients write developer for what chat templates call system.
        messages = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.text}
            for message in request.messages
        ]
        ids = await self._encode("messages", lambda: self.dialogue.encode(messages))
        asked = request.max_completion_tokens or request.max_tokens
        param = "max_tokens" if request.max_tokens else "max_completion_tokens"
        n_new = asked or max(1, min(self.limits.max_tokens, self.context - len(ids)))
        stop = (*request.stops, *self.dialogue.stop)
        return self._submit(request, ids, n_new, param, stop, request.n_alternatives)

    def cancel_all(self) -> None:
        """End every request: the server stops."""
        for running in tuple(self._running):
            running.cancel(stopping())

    def _refuse_model(self, request: SamplingRequest) -> None:
        if self.is_stopping:
            raise stopping()
        if request.model not in (None, self.name):
            raise ApiError(
                404, f"no model {request.model!r}; served: {self.name}", param="model", code="model_not_found"
            )

    async def _encode(self, param: str, encode: Callable[[], list[int]]) -> list[int]:
        try:
            return await asyncio.to_thread(encode)
        except ConfigError as error:
            raise ApiError(400, str(error), param=param) from None

    def _decoded(self, token: int) -> str:
        is_known = token < self.tokenizer.vocab_size  # a model may have padded its vocabulary
        return self.tokenizer.decode([token]) if is_known else ""

    def _submit(
        self,
        request: SamplingRequest,
        ids: list[int],
        n_new: int,
        param: str,
        stop: tuple[str, ...],
        n_alternatives: int,
    ) -> ActiveRequest:
        limits = self.limits
        if n_new > limits.max_tokens:
            raise ApiError(400, f"{param} is {n_new}, this server gives at most {limits.max_tokens}", param=param)
        if len(ids) + n_new > self.context:
            raise ApiError(
                400,
                f"{len(ids)} tokens of prompt and {n_new} new ones exceed the context of {self.context}; "
                f"shorten the prompt or lower {param}",
                param=param,
                code="context_length_exceeded",
            )
        seed = secrets.randbits(63) if request.seed is None else request.seed
        config = request.generation(n_new, seed, stop)
        self._event_queue = self._event_queue or EventQueue(asyncio.get_running_loop())
        try:
            running = ActiveRequest(
                self.engine,
                self.tokenizer,
                self._text_of,
                self.metrics,
                self._event_queue,
                ids,
                config,
                n_alternatives,
            )
        except QueueFull as error:
            raise queue_full(error.retry_after) from None
        except ConfigError as error:
            raise ApiError(400, str(error), param="prompt") from None
        except EngineClosed as error:
            if self.is_stopping:
                raise stopping() from None
            self._refused = error
            raise ApiError(503, str(error), code="engine_failed") from None
        self._running.add(running)
        return running
