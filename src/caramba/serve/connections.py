"""Connections on which no request comes, and too many of them: either would use up what a process may open."""

from __future__ import annotations

import asyncio
import resource
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from caramba.serve.failure import framing_refusal, too_many_connections
from caramba.serve.framing import Framing
from caramba.serve.metrics import Metrics

HEAD_SECONDS = 30.0  # for the head of a request to come whole, from the connection or from its first byte on
SPARE = 32  # connections above the bound that get this answer; those above them are cut off at once
LINGER_SECONDS = (
    1.0  # for a client to read that; what it sends is read and dropped, as a reset would overtake it
)
PROBE_SECONDS, PEER_CHECK_SECONDS = 2.0, 0.25
"""From the end of the client's half until it is probed, and from then between two looks at the socket."""
BACKLOG = 256  # connections that are accepted in one go, before the first of them is looked at
OTHER_FILES = 128  # that a process has open in addition to its connections


class TimedProtocol(H11Protocol):
    """uvicorn's protocol with strict framing, a time limit for a request's head, and a limit of open connections.

    uvicorn itself times a connection only between an answer and the next byte, and counts connections where a request
    has come. Bodies have a limit of their own.
    """

    most_open: int | None = None
    metrics: Metrics | None = None
    framing: Framing
    refused: set[TimedProtocol]
    """Those above the bound that still hear of it."""
    head_timer: asyncio.TimerHandle | None = None
    peer_check: asyncio.TimerHandle | None = None
    has_ended = is_probed = False
    """Whether the client has ended its half of the connection, and whether something was sent to find it there."""
    is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.framing = Framing()
        if self.most_open is not None and len(self.connections) > self.most_open:
            self._refuse(transport)
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        passed = self.framing.feed(data)
        if not passed:  # after the last request
            return
        super().data_received(passed)
        if self.is_refused:
            return
        if self.conn.their_state is h11.IDLE:
            self._await_head()
        else:
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is malformed, and close the connection: where the next one begins is unknown."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            # The application reads a body that has no end: it reads a disconnect.
            is_begun, cycle.disconnected = cycle.response_started, True
            cycle.message_event.set()
            if is_begun:
                self._linger()
                return
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # the request has its answer already
            self._linger()
            return
        if self.metrics is not None:
            self.metrics.requests.labels("other", "400").inc()
        response = framing_refusal(
            self.framing.reason or "it ended early, or its head is not HTTP/1.1"
        ).response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self._linger()

    def eof_received(self) -> bool | None:
        """Keep the connection open for answers to requests that came whole before the client ended its half of it."""
        self.has_ended = True
        if self.is_refused:
            return None
        if not (self.framing.is_between or self.framing.is_ended):
            self.send_400_response("")
            return True
        if self.cycle is None or self.cycle.response_complete:
            return None
        if self.peer_check is None:
            self.peer_check = self.loop.call_later(PROBE_SECONDS, self._probe_peer)
        return True

    def on_response_complete(self) -> None:
        """Take the next request that is there; after the last one of a client that ended its half, close."""
        super().on_response_complete()
        if self.has_ended and (self.cycle is None or self.cycle.response_complete):
            self.transport.close()

    def _probe_peer(self) -> None:
        """Find out whether a client that ended its half is still there.

        It may have closed the whole connection, which looks the same until it refuses something that is sent. An
        interim answer, which every client of HTTP/1.1 has to skip, is sent once, unless the answer has begun.
        """
        self.peer_check = None
        if self.cycle is None or self.cycle.response_complete or self.transport.is_closing():
            return
        connection = self.transport.get_extra_info("socket")
        if connection is not None and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        if not self.is_probed and not self.cycle.response_started and self.scope["http_version"] != "1.0":
            self.is_probed = True
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self.peer_check = self.loop.call_later(PEER_CHECK_SECONDS, self._probe_peer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self.peer_check is not None:
            self.peer_check.cancel()
            self.peer_check = None
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
        self._linger()

    def _linger(self) -> None:
        """Close after a while in which the client may read: what it sends meanwhile is read and dropped."""
        self.is_refused = True
        self._stop_waiting()
        self.transport.write_eof()
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


def protocol_class(most_open: int, metrics: Metrics | None = None) -> type[TimedProtocol]:
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
