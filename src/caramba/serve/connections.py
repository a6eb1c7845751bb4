"""Connections on which no request comes, and too many of them: either would use up what a process may open."""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from caramba.serve.failure import too_many_connections
from caramba.serve.metrics import Metrics

HEAD_SECONDS = 30.0  # for the head of a request to come whole, from the connection or from its first byte on
SPARE = 32  # connections above the bound that are told so; those above them are cut off at once
LINGER_SECONDS = (
    1.0  # for a client to read that; what it sends is read and dropped, as a reset would overtake it
)
BACKLOG = 256  # connections that are accepted in one go, before the first of them is looked at
OTHER_FILES = 128  # that a process has open beside its connections


class TimedProtocol(H11Protocol):
    """uvicorn's protocol, with a limit to how long the head of a request may take, however slowly it drips in, and a
    bound to how many connections are open at a time.

    uvicorn itself times a connection only between an answer and the next byte, and counts connections where a request
    has come. Bodies have a limit of their own.
    """

    most_open: int | None = None
    metrics: Metrics | None = None
    refused: set[TimedProtocol]
    """Those above the bound that still hear of it."""
    head_timer: asyncio.TimerHandle | None = None
    is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.most_open is not None and len(self.connections) > self.most_open:
            self._refuse(transport)
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self.is_refused:
            self.refused.discard(self)
        super().connection_lost(exc)

    def _refuse(self, transport: asyncio.Transport) -> None:
        self.is_refused = True
        self.connections.discard(self)
        if self.metrics is not None:
            self.metrics.refused_connections.inc()
        if len(self.refused) >= SPARE:
            transport.abort()
            return
        self.refused.add(self)
        transport.write(refusal())
        transport.write_eof()
        self.head_timer = self.loop.call_later(LINGER_SECONDS, self._give_up)

    def _await_head(self) -> None:
        if self.head_timer is None:
            self.head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()


def bounded(most_open: int, metrics: Metrics | None = None) -> type[TimedProtocol]:
    """Return the protocol of one server that keeps at most `most_open` connections, and counts those it refuses."""

    class Bounded(TimedProtocol):
        refused: set[TimedProtocol] = set()

    Bounded.most_open, Bounded.metrics = most_open, metrics
    return Bounded


def refusal() -> bytes:
    """Return the whole answer to a connection above the bound: no request of it has been read."""
    response = too_many_connections().response()
    headers = b"".join(b"%s: %s\r\n" % header for header in response.raw_headers)
    head = b"HTTP/1.1 503 Service Unavailable\r\n" + headers + b"connection: close\r\n\r\n"
    return head + bytes(response.body)


def connections_that_fit(wanted: int) -> int:
    """Return how many connections, at most `wanted`, the files that this process may open leave room for.

    The soft limit is raised as far as the hard one allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    beside = SPARE + BACKLOG + OTHER_FILES
    needed = wanted + beside
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if raised > soft:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        except (ValueError, OSError):  # what has no hard limit may have one in the kernel
            raised = soft
    return max(1, min(wanted, max(raised, soft) - beside))
