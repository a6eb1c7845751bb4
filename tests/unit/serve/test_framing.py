"""Requests of ambiguous framing get 400 and the end of the connection; no byte after them becomes a request."""

from __future__ import annotations

import logging
import random
import re
import socket
from collections.abc import Iterator

import pytest

from caramba.serve.connections import (
    FEWEST_PER_CHUNK,
    FREE_CHUNKS,
    MOST_CHUNK_LINE,
    MOST_FIELDS,
    MOST_HEAD_BYTES,
    REFUSED,
    Framing,
)
from tests.unit.serve.served import byte_model, service_of, serving

Address = tuple[str, int]
HOST = b"Host: 127.0.0.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
BODY = b'{"prompt":"a","max_tokens":1}'
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
PROBE = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
STATUS = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")

AMBIGUOUS = {
    "length_and_coding": POST + LENGTH + CHUNKED + b"\r\n" + CHUNKS,
    "coding_and_length": POST + CHUNKED + LENGTH + b"\r\n" + CHUNKS,
    "two_lengths": POST + LENGTH + b"Content-Length: 3\r\n\r\n" + BODY,
    "list_of_lengths": POST + b"Content-Length: 3, %d\r\n\r\n" % len(BODY) + BODY,
    "equal_lengths": POST + LENGTH + LENGTH + b"\r\n" + BODY,
    "signed_length": POST + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY,
    "hexadecimal_length": POST + b"Content-Length: 0x1d\r\n\r\n" + BODY,
    "empty_length": POST + b"Content-Length: \r\n\r\n",
    "long_length": POST + b"Content-Length: %s\r\n\r\n" % (b"9" * 30),
    "two_codings": POST + CHUNKED + CHUNKED + b"\r\n" + CHUNKS,
    "other_coding": POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + CHUNKS,
    "hidden_coding": POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n" + CHUNKS,
    "identity": POST + b"Transfer-Encoding: identity\r\n" + LENGTH + b"\r\n" + BODY,
    "old_version_with_coding": (POST + CHUNKED + b"\r\n" + CHUNKS).replace(b"HTTP/1.1", b"HTTP/1.0"),
    "newer_version": PROBE.replace(b"HTTP/1.1", b"HTTP/2.0"),
    "bare_lf_line": POST + LENGTH.replace(b"\r\n", b"\n") + b"\r\n" + BODY,
    "bare_lf_end": POST + LENGTH + b"\n" + BODY,
    "bare_lf_request_line": PROBE.replace(b"HTTP/1.1\r\n", b"HTTP/1.1\n"),
    "bare_cr": POST + b"X: a\rContent-Length: 3\r\n" + LENGTH + b"\r\n" + BODY,
    "nul": POST + b"X: a\x00b\r\n" + LENGTH + b"\r\n" + BODY,
    "folded": POST + b"X: a\r\n Content-Length: 3\r\n" + LENGTH + b"\r\n" + BODY,
    "folded_tab": POST + b"X: a\r\n\tb\r\n" + LENGTH + b"\r\n" + BODY,
    "space_before_colon": POST + LENGTH.replace(b":", b" :") + b"\r\n" + BODY,
    "tab_before_colon": POST + CHUNKED.replace(b":", b"\t:") + b"\r\n" + CHUNKS,
    "no_colon": POST + b"X\r\n" + LENGTH + b"\r\n" + BODY,
    "no_name": POST + b": x\r\n" + LENGTH + b"\r\n" + BODY,
    "two_hosts": PROBE.replace(HOST, HOST + HOST),
    "two_hosts_that_differ": PROBE.replace(HOST, HOST + b"Host: localhost\r\n"),
    "no_host": PROBE.replace(HOST, b""),
    "two_hosts_of_old_version": PROBE.replace(b"HTTP/1.1", b"HTTP/1.0").replace(HOST, HOST + HOST),
    "empty_first_line": b"\r\n" + PROBE,
    "two_spaces": PROBE.replace(b"GET ", b"GET  "),
    "chunk_size_with_space": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n{", b" \r\n{"),
    "chunk_size_with_prefix": POST + CHUNKED + b"\r\n0x" + CHUNKS,
    "chunk_size_negative": POST + CHUNKED + b"\r\n-" + CHUNKS,
    "chunk_size_empty": POST + CHUNKED + b"\r\n\r\n" + CHUNKS,
    "chunk_size_too_long": POST + CHUNKED + b"\r\n" + b"0" * 17 + CHUNKS,
    "chunk_size_too_small": POST + CHUNKED + b"\r\n5\r\n" + BODY + b"\r\n0\r\n\r\n",
    "chunk_with_bare_lf": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n{", b"\n{"),
    "chunk_end_with_bare_lf": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"}\r\n", b"}\n"),
    "chunk_extension_with_cr": POST + CHUNKED + b"\r\n" + CHUNKS.replace(b"\r\n{", b";a\rb\r\n{"),
    "chunk_extension_too_long": POST + CHUNKED + b"\r\n1d;" + b"a" * MOST_CHUNK_LINE + b"\r\n",
    "trailer_with_length": POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + LENGTH + b"\r\n",
    "trailer_folded": POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"X: a\r\n b\r\n\r\n",
    "trailer_with_bare_lf": POST + CHUNKED + b"\r\n" + CHUNKS[:-2] + b"X: a\n\r\n",
    "many_small_chunks": POST + CHUNKED + b"\r\n" + b"1\r\n \r\n" * (FREE_CHUNKS + 1),
    "many_fields": POST + b"X: a\r\n" * MOST_FIELDS,
    "long_head": POST + b"X: " + b"a" * MOST_HEAD_BYTES + b"\r\n",
    "long_line_without_end": POST + b"X: " + b"a" * MOST_HEAD_BYTES,
}
CLEAR = {
    "length": POST + LENGTH + b"\r\n" + BODY,
    "chunks": POST + CHUNKED + b"\r\n" + CHUNKS,
    "chunks_of_three": POST + CHUNKED + b"\r\n3;a=b\r\n" + BODY[:3] + b"\r\n001a\r\n" + BODY[3:] + b"\r\n0\r\n\r\n",
    "trailer": POST + b"transfer-encoding:CHUNKED \t\r\n\r\n" + CHUNKS[:-2] + b"X: a\r\n\r\n",
    "probe": PROBE,
}


@pytest.fixture(scope="module")
def address() -> Iterator[Address]:
    with serving(service_of(byte_model())) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        yield host, int(port)


def answers(address: Address, *pieces: bytes) -> tuple[list[int], bytes]:
    """Return the status of every answer on one connection, which the server closes, and all bytes."""
    found = b""
    with socket.create_connection(address, timeout=20) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server has closed it
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            pass
    return [int(status) for status in STATUS.findall(found)], found


def cut(rng: random.Random, text: bytes) -> list[bytes]:
    """Return the text in pieces of random lengths."""
    ends = sorted(rng.sample(range(1, len(text)), min(len(text) - 1, rng.choice((0, 1, 3, 20)))))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_ambiguous_request_gets_400_and_the_end_of_the_connection(address: Address, name: str) -> None:
    statuses, found = answers(address, AMBIGUOUS[name], PROBE)
    assert statuses == [400], found
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert b"malformed_request" in body
    statuses, found = answers(address, PROBE + CLEAR["length"] + AMBIGUOUS[name] + PROBE)
    assert statuses == [200, 200, 400], found


@pytest.mark.parametrize("name", CLEAR)
def test_clear_request_keeps_the_connection(address: Address, name: str) -> None:
    last = PROBE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    statuses, found = answers(address, CLEAR[name] + CLEAR[name], PROBE + last + AMBIGUOUS["two_hosts"])
    assert statuses == [200] * 4, found


def test_request_of_old_version_ends_the_connection(address: Address) -> None:
    for text in (CLEAR["length"], PROBE):
        assert answers(address, text.replace(b"HTTP/1.1", b"HTTP/1.0") + PROBE)[0] == [200]


@pytest.mark.parametrize("seed", range(40))
def test_random_requests_are_split_as_they_were_joined(
    address: Address, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(seed)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            n_clear = rng.randint(0, 4)
            text = b"".join(rng.choice(list(CLEAR.values())) for _ in range(n_clear))
            text += rng.choice(list(AMBIGUOUS.values())) + PROBE
            statuses, found = answers(address, *cut(rng, text))
            assert statuses == [200] * n_clear + [400], (text, found)
    assert not caplog.records


@pytest.mark.parametrize("seed", range(40))
def test_mutated_bytes_never_add_a_request(address: Address, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(1000 + seed)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            text = bytearray(rng.choice(list(CLEAR.values())))
            end = text.index(b"\r\n\r\n") + 4
            for _ in range(rng.randint(1, 3)):
                at = rng.randrange(end)
                kind = rng.randrange(3)
                text[at : at + (kind != 0)] = b"" if kind == 2 else bytes([rng.choice(b"\r\n \t:,;0\x00\xffa")])
            last = PROBE.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
            sent = bytes(text) + last + b"\r\n" * 2 + b"x" * 200 + b"\r\n\r\n"
            statuses, found = answers(address, *cut(rng, sent))
            # One answer to the mutated request and one to the last, or the first 400 ends the connection.
            assert 1 <= len(statuses) <= 2, (sent, found)
            assert set(statuses) <= {200, 400, 401, 404, 405, 413, 415, 421, 422}, (sent, found)
    assert not caplog.records


@pytest.mark.parametrize("seed", range(50))
def test_feed_gives_the_same_however_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    name = rng.choice(list(AMBIGUOUS))
    text = rng.choice(list(CLEAR.values())) + AMBIGUOUS[name] + PROBE
    whole, parts = Framing(), Framing()
    expected = whole.feed(text)
    found = b"".join(parts.feed(piece) for piece in cut(rng, text))
    assert expected.endswith(REFUSED)
    assert found.endswith(REFUSED)
    assert found.startswith(expected.removesuffix(REFUSED))  # pieces of a line pass before its end is known
    assert (whole.reason, whole.is_ended) == (parts.reason, True)


def test_feed_of_small_chunks_is_bounded_per_byte() -> None:
    framing = Framing()
    chunk = b"%x\r\n%s\r\n" % (FEWEST_PER_CHUNK, b" " * FEWEST_PER_CHUNK)
    text = POST + CHUNKED + b"\r\n" + chunk * (4 * FREE_CHUNKS)
    assert framing.feed(text) == text
    assert not framing.is_ended
