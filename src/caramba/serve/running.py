"""One request in the engine: its tokens as they come, as pieces of text that are certain."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from caramba.config.generate import GenerateConfig
from caramba.data import Tokenizer
from caramba.errors import CarambaError
from caramba.infer.engine import Engine, Event, RequestHandle
from caramba.infer.row import TextStream
from caramba.serve.failure import ApiError
from caramba.serve.metrics import Metrics
from caramba.serve.schema import Finish, Usage

MOST_EVENTS = 32
"""Of one piece: a request whose client reads slowly must not hold the loop with all its tokens at once."""


class ClientGone(Exception):  # noqa: N818 - an event, not a fault
    """The client has closed the connection."""


@dataclass(frozen=True)
class SampledToken:
    """A new token: its text alone, its log-probability in nats, how much text was certain before it, the most likely
    tokens at its place, and its id."""

    text: str
    logprob: float
    offset: int
    alternatives: "tuple[Alternative, ...]"
    id: int


@dataclass(frozen=True)
class Alternative:
    """One of the most likely tokens of a step: its id, its text alone and its log-probability in nats."""

    id: int
    text: str
    logprob: float


@dataclass
class Piece:
    """What came at once: text, the tokens that were sampled, and why the answer ended if it did."""

    text: str = ""
    sampled: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None


class EventQueue:
    """Brings events from the engine's thread to the loop of the server, all that are there at one wake-up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Callable[[Event], None], Event]] = deque()
        self._is_rung = False

    def put(self, hear: Callable[[Event], None], event: Event) -> None:
        """Let `hear` be called with an event on the loop; from any thread, in order."""
        self._waiting.append((hear, event))
        if not self._is_rung:
            self._is_rung = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_rung = False  # before looking: what comes meanwhile rings again
        while self._waiting:
            hear, event = self._waiting.popleft()
            hear(event)


class ActiveRequest:
    """A submitted request. `cancel` may be called at any time, more than once; it frees the slot."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        text_of: Callable[[int], str],
        metrics: Metrics,
        event_queue: EventQueue,
        prompt: Sequence[int],
        config: GenerateConfig,
        n_alternatives: int = 0,
    ) -> None:
        """Submit it.

        Raises:
            QueueFull: no place in the queue.
            ConfigError: a prompt that the model cannot take.
        """
        self._text_of, self.metrics, self.n_prompt = text_of, metrics, len(prompt)
        self.stream = TextStream(tokenizer, prompt, config.stop)
        self.n_new = self.n_chars = 0
        self.stopped_by: ApiError | None = None
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._at = time.perf_counter()
        self.ticket: RequestHandle = engine.submit(
            prompt, config, on_event=partial(event_queue.put, self._note), n_alternatives=n_alternatives
        )
        metrics.prompt_tokens.inc(self.n_prompt)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return Usage.of(self.n_prompt, self.n_new)

    def cancel(self, why: ApiError | None = None) -> None:
        """End it: with an error for the client, or because nobody reads the answer."""
        self.stopped_by = self.stopped_by or why
        self.ticket.cancel()

    async def stream_text(self) -> AsyncIterator[Piece]:
        """Yield what is new whenever something is, until the answer has ended.

        Raises:
            ApiError: the model failed, or the server cancelled the request.
            ClientGone: it was cancelled without a reason that anyone waits for.
        """
        finish: Finish | None = None
        while finish is None:
            events = [await self._events.get()]
            while not self._events.empty() and len(events) < MOST_EVENTS:  # of a client that reads slowly
                events.append(self._events.get_nowait())
            piece = Piece()
            for event in events:
                self._take(event, piece)
                if piece.finish is not None:
                    break
            finish = piece.finish
            yield piece
            await asyncio.sleep(0)  # where events wait, `get` does not let other requests run

    def _note(self, event: Event) -> None:
        now = time.perf_counter()
        if event.token is not None:
            histogram = self.metrics.between_tokens if self.n_new else self.metrics.first_token
            histogram.observe(now - self._at)
            self.metrics.new_tokens.inc()
            self._at = now
            self.n_new += 1
        if event.finish_reason is not None:
            self.metrics.finished.labels(event.finish_reason).inc()
        self._events.put_nowait(event)

    def _take(self, event: Event, piece: Piece) -> None:
        if event.token is not None and event.logprob is not None:
            alternatives = tuple(
                Alternative(token, self._text_of(token), logprob) for token, logprob in event.alternatives
            )
            text = self._text_of(event.token)
            piece.sampled.append(SampledToken(text, event.logprob, self.n_chars, alternatives, event.token))
            self._add(self.stream.push([event.token]), piece)
        if event.finish_reason is None:
            return
        if event.finish_reason == "cancelled":
            raise self.stopped_by or ClientGone
        if event.finish_reason == "error":
            raise _failure(self.ticket.error)
        self._add(self.stream.close(), piece)
        is_cut = self.stream.is_stopped or event.finish_reason != "length"
        piece.finish = "stop" if is_cut else "length"

    def _add(self, text: str, piece: Piece) -> None:
        piece.text += text
        self.n_chars += len(text)


def _failure(error: BaseException | None) -> ApiError:
    known = isinstance(error, CarambaError)
    logging.getLogger("caramba.serve").error("a request failed", exc_info=None if known else error)
    text = str(error) if known else f"the model failed ({type(error).__name__}); the server's log has more"
    return ApiError(500, text, code="model_failed")
