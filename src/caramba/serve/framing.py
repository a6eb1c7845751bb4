"""Strict framing of requests: bytes that two parsers could split differently never reach the application.

A lenient parser in front of or behind another one lets a request hide in the body of the one before it (RFC 9112,
section 11.2). This scanner checks the bytes of a connection before the HTTP library parses them.
"""

import re

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
        tokens = {
            part.strip().lower() for value in values.get(b"connection", []) for part in value.split(b",")
        }
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
            raise Malformed(
                f"more than {FREE_CHUNKS} chunks of fewer than {FEWEST_PER_CHUNK} bytes on average"
            )
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
