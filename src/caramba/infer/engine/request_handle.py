"""What a caller holds of a request: its tokens as they come, its end, and the means to cancel it."""

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from caramba.infer.row import GenerationRow

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop` is an end mark or a stop text."""
ENDS: dict[str, FinishReason] = {"eos": "stop", "stop": "stop", "length": "length"}

Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens of a step and their log-probabilities in nats, the most likely first."""


@dataclass(frozen=True)
class Event:
    """A new token with its log-probability in nats, or, without a token, the end of its request.

    `alternatives` holds as many of the most likely tokens as the request asked for.
    """

    token: int | None = None
    logprob: float | None = None
    finish_reason: FinishReason | None = None
    alternatives: Alternatives = ()


OnEvent = Callable[[Event], None]


class RequestHandle:
    """One request. Iterating waits for its events, the last of which alone has a `finish_reason`; any number of
    threads may. Tokens and log-probabilities are those that `generate` gives for the same seed: without the end mark,
    with the one that completed a stop text.

    `on_event` is called from the engine's thread with each event and must not wait; what it raises ends its request.
    """

    def __init__(
        self, row: GenerationRow, on_event: OnEvent | None = None, wake: Callable[[], None] | None = None
    ) -> None:
        self.row = row
        self.error: BaseException | None = None
        self.is_cancelled = False
        self._on_event, self._wake = on_event, wake
        self._events: list[Event] = []
        self._news = threading.Condition()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new tokens so far."""
        return tuple(self.row.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Their log-probabilities, before temperature, penalty and filters."""
        return tuple(self.row.logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request has ended, None while it has not."""
        return self._events[-1].finish_reason if self._events else None

    def cancel(self) -> None:
        """End the request: at the engine's next step it leaves the queue or its slot."""
        self.is_cancelled = True
        if self._wake is not None:
            self._wake()

    def __iter__(self) -> Iterator[Event]:
        for index in itertools.count():
            with self._news:
                while len(self._events) <= index:
                    self._news.wait()
            yield self._events[index]
            if self._events[index].finish_reason is not None:
                return

    def wait(self, timeout: float | None = None) -> FinishReason | None:
        """Wait until the request has ended and return why; None after `timeout` seconds.

        Raises:
            BaseException: what its step raised, if its reason is `error`.
        """
        with self._news:
            self._news.wait_for(lambda: self.finish_reason is not None, timeout)
        if self.error is not None:
            raise self.error
        return self.finish_reason

    def put(self, event: Event) -> None:
        """Add an event; the engine calls this."""
        with self._news:
            self._events.append(event)
            self._news.notify_all()
        if self._on_event is not None:
            self._on_event(event)
