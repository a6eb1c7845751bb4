"""Connections: strict framing of requests, a limit of time for their heads, and a bound on how many are open."""

import asyncio
import re
import resource
import socket

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from caramba.serve.failure import framing_refusal, too_many_connections
from caramba.serve.metrics import Metrics

MOST_CHUNK_LINE = 1024
"""Bytes of a chunk's size and extensions (RFC 9112, 7.1.1 asks for a limit)."""
FEWEST_PER_CHUNK, FREE_CHUNKS = 64, 4096
"""Mean bytes of a chunk beyond the first FREE_CHUNKS: every chunk costs time of the event loop."""
MOST_HEAD_BYTES, MOST_FIELDS = 1 << 16, 256
"""Of a head, and of a trailer."""
REFUSED = b"\x00\n\r\n"
"""Takes the place of malformed bytes. No grammar of HTTP/1.1 accepts it in a head, at a chunk or in a trailer."""

_TOKEN = rb"[-!#$%&'*+.^_`|~0-9A-Za-z]+"
_TEXT = rb"[\t\x20-\x7e\x80-\xff]*"
_REQUEST = re.compile(_TOKEN + rb" [\x21-\x7e]+ HTTP/1\.([01])\r\n")
_FIELD = re.compile(rb"(" + _TOKEN + rb"):(" + _TEXT + rb")\r\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,16})(?:;" + _TEXT + rb")?\r\n")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_FRAMING = frozenset({b"content-length", b"transfer-encoding", b"host"})


class Malformed(Exception):  # noqa: N818 - not an error of the server
    """The bytes are not exactly one request by RFC 9112."""


class Framing:
    """The state of one connection's requests: where the next head, chunk or trailer begins.

    `feed` returns the bytes that the HTTP library may parse. From the first malformed line on, that is REFUSED, once,
    then nothing. After a request that ends the connection, further bytes are dropped.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """What was malformed, if anything."""
        self.is_ended = False
        """True after the last request of the connection or a malformed one."""
        self._line = bytearray()  # the line so far: earlier bytes of it have been passed on
        self._read = self._request_line
        self._n_left = 0  # bytes of a body or of a chunk that pass without a look
        self._begin()

    @property
    def is_between(self) -> bool:
        """True if no request is incomplete."""
        return self._read == self._request_line and not self._line and not self._n_left

    def feed(self, data: bytes) -> bytes:
        """Return what the HTTP library may parse of the next bytes of a connection."""
        at = 0
        while at < len(data):
            if self.is_ended:
                return data[:at]
            if self._n_left:
                n_bytes = min(self._n_left, len(data) - at)
                self._n_left -= n_bytes
                at += n_bytes
                if not self._n_left:
                    self._body_ended()
                continue
            end = data.find(b"\n", at) + 1
            self._line += data[at : end or len(data)]
            try:
                if end:
                    line = bytes(self._line)
                    self._line.clear()
                    self._refuse_long(len(line))
                    self._read(line)
                else:
                    self._refuse_long(len(self._line))
            except Malformed as error:
                self.reason, self.is_ended = str(error), True
                return data[:at] + REFUSED
            at = end or len(data)
        return data

    def _begin(self) -> None:
        self._read = self._request_line
        self._fields: list[tuple[bytes, bytes]] = []
        self._is_chunked = self._is_last = False
        self._n_chunks = self._n_chunk_bytes = self._n_fields = self._n_head_bytes = 0

    def _request_line(self, line: bytes) -> None:
        match = _REQUEST.fullmatch(line)
        if match is None:
            raise Malformed("the request line is not METHOD TARGET HTTP/1.1 with CRLF")
        self._is_old = match[1] == b"0"
        self._read = self._field

    def _field(self, line: bytes) -> None:
        if line == b"\r\n":
            self._head_ended()
            return
        name, value = self._counted_field(line)
        if name in _FRAMING or name == b"connection":
            self._fields.append((name, value))

    def _head_ended(self) -> None:
        values = {name: [value for key, value in self._fields if key == name] for name, _ in self._fields}
        lengths, codings = values.get(b"content-length", []), values.get(b"transfer-encoding", [])
        n_hosts = len(values.get(b"host", []))
        if n_hosts > 1 or (n_hosts == 0 and not self._is_old):
            raise Malformed(f"{n_hosts} Host fields, expected one")
        if lengths and codings:
            raise Malformed("both Content-Length and Transfer-Encoding, expected one of them")
        if len(lengths) > 1 or any(_LENGTH.fullmatch(value) is None for value in lengths):
            raise Malformed("Content-Length is repeated or not one number")
        if codings and self._is_old:
            raise Malformed("Transfer-Encoding in a request of HTTP/1.0")
        if len(codings) > 1 or any(value.lower() != b"chunked" for value in codings):
            raise Malformed("Transfer-Encoding is repeated or not chunked")
        tokens = {part.strip().lower() for value in values.get(b"connection", []) for part in value.split(b",")}
        self._is_last = self._is_old or b"close" in tokens
        self._is_chunked = bool(codings)
        self._n_left = int(lengths[0]) if lengths else 0
        if self._is_chunked:
            self._read = self._chunk_size
        elif not self._n_left:
            self._body_ended()

    def _chunk_size(self, line: bytes) -> None:
        match = _CHUNK.fullmatch(line)
        if match is None:
            raise Malformed("a chunk begins without its size in hexadecimal digits and CRLF")
        self._n_left = int(match[1], 16)
        self._n_chunks += 1
        self._n_chunk_bytes += self._n_left
        if self._n_chunks > FREE_CHUNKS and self._n_chunk_bytes < FEWEST_PER_CHUNK * self._n_chunks:
            raise Malformed(f"more than {FREE_CHUNKS} chunks of fewer than {FEWEST_PER_CHUNK} bytes on average")
        self._read = self._chunk_end if self._n_left else self._trailer

    def _refuse_long(self, n_bytes: int) -> None:
        is_chunk = self._read == self._chunk_size
        if n_bytes > MOST_CHUNK_LINE if is_chunk else self._n_head_bytes + n_bytes > MOST_HEAD_BYTES:
            raise Malformed("a line or the head is too long")

    def _counted_field(self, line: bytes) -> tuple[bytes, bytes]:
        self._n_fields += 1
        self._n_head_bytes += len(line)
        if self._n_fields > MOST_FIELDS or self._n_head_bytes > MOST_HEAD_BYTES:
            raise Malformed(f"more than {MOST_FIELDS} header lines or {MOST_HEAD_BYTES} bytes of them")
        return _parse_field(line)

    def _chunk_end(self, line: bytes) -> None:
        if line != b"\r\n":
            raise Malformed("a chunk is longer than its size")
        self._read = self._chunk_size

    def _trailer(self, line: bytes) -> None:
        if line == b"\r\n":
            self._request_ended()
        elif self._counted_field(line)[0] in _FRAMING:
            raise Malformed("a trailer holds a field of the head")

    def _body_ended(self) -> None:
        if not self._is_chunked:
            self._request_ended()

    def _request_ended(self) -> None:
        self.is_ended = self._is_last
        self._begin()


def _parse_field(line: bytes) -> tuple[bytes, bytes]:
    """Return the name in lower case and the value of a header line.

    Raises:
        Malformed: a folded line, a space before the colon, a bare CR or LF, or a control character.
    """
    match = _FIELD.fullmatch(line)
    if match is None:
        raise Malformed("a header line is not NAME: VALUE with CRLF, or it is folded")
    return match[1].lower(), match[2].strip(b" \t")


HEAD_SECONDS = 30.0  # for the head of a request to come whole, from the connection or from its first byte on
SPARE = 32  # connections above the bound that get this answer; those above them are cut off at once
LINGER_SECONDS = 1.0  # for a client to read that; what it sends is read and dropped, as a reset would overtake it
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
    refused: "set[TimedProtocol]"
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
        response = framing_refusal(self.framing.reason or "it ended early, or its head is not HTTP/1.1").response()
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
