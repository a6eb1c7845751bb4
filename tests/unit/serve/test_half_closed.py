"""A client that ends its half of a connection after a whole request gets its whole answer; one that leaves does not."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from caramba.serve import connections
from caramba.serve.service import Service
from tests.unit.serve.served import byte_model, eventually, service_of, serving

PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module")
def service() -> Service:
    return service_of(byte_model())


@pytest.fixture(scope="module")
def port(service: Service) -> Iterator[int]:
    with serving(service) as url:
        yield int(url.rpartition(":")[2])


@pytest.fixture
def slow(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take at least 5 ms for a token."""
    decode = service.engine.batch.decode
    monkeypatch.setattr(service.engine.batch, "decode", lambda: (time.sleep(0.005), decode())[1])


def request(path: str = "/v1/completions", **more: Any) -> bytes:
    body = json.dumps({**PATHS[path], "max_tokens": 24, "temperature": 0, **more}).encode()
    return (
        b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % (path.encode(), len(body))
    ) + body


def read(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def half_closed(port: int, text: bytes) -> bytes:
    """Return all that comes after the client has sent a text and ended its half."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(text)
        connection.shutdown(socket.SHUT_WR)
        return read(connection)


def whole(found: bytes) -> str:
    """Return the text of a whole answer, streamed or not."""
    head, _, body = found.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), found
    if b"text/event-stream" in head:
        assert body.endswith(b"0\r\n\r\n")
        events = re.findall(rb"data: (\{.*?\})\n\n", body)
        assert b"data: [DONE]" in body
        choices = [json.loads(event)["choices"][0] for event in events]
    else:
        choices = json.loads(body)["choices"]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(
        choice.get("text") or (choice.get("delta") or choice.get("message") or {}).get("content") or ""
        for choice in choices
    )


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("slow")
def test_half_closed_client_gets_its_whole_answer(port: int, path: str) -> None:
    texts = [whole(half_closed(port, request(path, stream=stream))) for stream in (False, True)]
    assert texts[0] == texts[1] != ""


def test_half_closed_client_gets_all_answers_to_pipelined_requests(port: int) -> None:
    found = half_closed(port, request() * 3 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert found.count(b"HTTP/1.1 200 ") == 4


@pytest.mark.usefixtures("slow")
def test_half_closed_client_that_waits_long_gets_one_interim_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(connections, "PEER_CHECK_SECONDS", 0.02)
    found = half_closed(port, request(max_tokens=40))
    assert found.startswith(PROBE)
    assert whole(found.removeprefix(PROBE))
    assert b" 100 " not in half_closed(port, request(max_tokens=40).replace(b"HTTP/1.1", b"HTTP/1.0"))


def test_half_closed_client_without_a_whole_request_gets_400(port: int) -> None:
    for text in (b"GET /health HTTP/1.1\r\nHost: loc", request()[:-1], b"x"):
        assert half_closed(port, text).startswith(b"HTTP/1.1 400 ")
    assert half_closed(port, b"") == b""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("slow")
def test_client_that_closes_the_connection_frees_its_slot(
    port: int, service: Service, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "PROBE_SECONDS", 0.1)
    n_cancelled = service.engine.stats().cancelled
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request(max_tokens=900, stream=stream))
        assert eventually(lambda: service.engine.stats().active == 1)
    assert eventually(lambda: service.engine.stats().active == 0)
    assert service.engine.stats().cancelled == n_cancelled + 1  # its 900 tokens were not waited for
