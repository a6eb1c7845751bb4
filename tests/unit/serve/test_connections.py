"""Connections without a whole request end, as do those above the bound; requests are answered, however long it takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from caramba.infer.engine import EngineStats
from caramba.serve import connections
from caramba.serve.metrics import Metrics

LIMIT, GUARD_S = 0.4, 25.0  # the guard is below uvicorn's own limit
REQUEST = b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"
Address = tuple[str, int]
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def answer(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * LIMIT)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def served(
    talk: Callable[[Address], Awaitable[None]],
    protocol: type[connections.TimedProtocol] = connections.TimedProtocol,
) -> None:
    """Run a conversation with a server of a protocol."""

    async def run() -> None:
        config = uvicorn.Config(
            answer, port=0, lifespan="off", http=protocol, ws="none", log_config=None,
            timeout_keep_alive=30,
        )  # fmt: skip
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        try:
            await talk(server.servers[0].sockets[0].getsockname()[:2])
        finally:
            server.should_exit = True
            await task

    asyncio.run(run())


async def seconds_open(address: Address, *pieces: bytes, every: float = 0.0) -> float:
    """Return how long a connection stays open on which these bytes are sent."""
    reader, writer = await asyncio.open_connection(*address)
    began = time.monotonic()

    async def drip() -> None:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(every)

    task = asyncio.create_task(drip())
    with contextlib.suppress(ConnectionResetError):  # what still drips in meets a closed socket
        assert await asyncio.wait_for(reader.read(), GUARD_S) == b""
    spent = time.monotonic() - began
    task.cancel()
    writer.close()
    return spent


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", LIMIT)


def test_connections_without_a_whole_head_are_closed() -> None:
    async def talk(address: Address) -> None:
        # Nothing at all, half a head, and one that never stops to come.
        drops = [bytes([byte]) for byte in b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 2000]
        found = await asyncio.gather(
            seconds_open(address),
            seconds_open(address, REQUEST[:12]),
            seconds_open(address, *drops, every=LIMIT / 20),
        )
        assert all(spent > LIMIT / 2 for spent in found), found

    served(talk)


def test_requests_are_answered_however_long_that_takes_and_the_next_head_is_timed_again() -> None:
    async def talk(address: Address) -> None:
        reader, writer = await asyncio.open_connection(*address)
        for path in (b"slow", b"quick"):
            writer.write(REQUEST % path)
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), GUARD_S)).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(2 * LIMIT)  # between requests uvicorn's own limit holds
        writer.write(REQUEST % b"quick")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(REQUEST[:9])
        began = time.monotonic()
        assert await asyncio.wait_for(reader.read(), GUARD_S) == b""
        assert time.monotonic() - began > LIMIT / 2
        writer.close()

    served(talk)


def test_connections_above_the_bound_are_told_so_and_make_room_for_none() -> None:
    metrics = Metrics(EngineStats)
    protocol = connections.protocol_class(2, metrics)
    request = REQUEST % b"quick"

    async def answered(address: Address, sent: bytes) -> tuple[bytes, Streams]:
        streams = await asyncio.open_connection(*address)
        streams[1].write(sent)
        return await asyncio.wait_for(streams[0].readuntil(b"ok"), GUARD_S), streams

    async def talk(address: Address) -> None:
        kept = [(await answered(address, request))[1] for _ in range(2)]
        for sent in (b"", request, b"x" * 100_000):  # whatever a client says first
            reader, writer = await asyncio.open_connection(*address)
            writer.write(sent)
            head, _, body = (await asyncio.wait_for(reader.read(), GUARD_S)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            lines = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
            assert (lines[b"retry-after"], lines[b"connection"]) == (b"1", b"close")
            assert int(lines[b"content-length"]) == len(body)
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            writer.close()
        assert metrics.refused_connections._value.get() == 3
        kept[0][1].write(request)  # those within the bound go on
        assert (await kept[0][0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        kept[1][1].close()
        await kept[1][1].wait_closed()
        await asyncio.sleep(LIMIT / 4)
        assert (await answered(address, request))[0].startswith(b"HTTP/1.1 200")

    served(talk, protocol)
    assert not protocol.refused


def test_not_even_refused_connections_are_unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SPARE", 2)
    monkeypatch.setattr(connections, "LINGER_SECONDS", LIMIT)
    protocol = connections.protocol_class(1)

    async def read(address: Address) -> tuple[bytes, float]:
        """Return what a client that says nothing reads, and how long its side of the connection can be written to."""
        reader, writer = await asyncio.open_connection(*address)
        began = time.monotonic()
        try:
            found = await reader.read()
            while True:  # its own half is open until the server closes, too
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(LIMIT / 20)
        except ConnectionError:
            return found if reader.at_eof() else b"", time.monotonic() - began

    async def talk(address: Address) -> None:
        streams = await asyncio.open_connection(*address)
        streams[1].write(REQUEST % b"quick")
        await streams[0].readuntil(b"ok")
        found = await asyncio.wait_for(asyncio.gather(*(read(address) for _ in range(6))), GUARD_S)
        told = [spent for text, spent in found if b"too_many_connections" in text]
        assert len(told) == 2
        assert min(told) > LIMIT / 2, told
        assert max(spent for text, spent in found if not text) < min(told), found

    served(talk, protocol)


def test_servers_count_for_themselves() -> None:
    one, other = connections.protocol_class(1), connections.protocol_class(2)
    assert one.refused is not other.refused
    assert (one.most_open, other.most_open) == (1, 2)


@pytest.mark.parametrize(
    ("limits", "fits", "raised"),
    [
        ((5000, 9000), 1024, None),
        ((1024, 9000), 1024, 1440),
        ((1024, resource.RLIM_INFINITY), 1024, 1440),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1024, None),
        ((256, 512), 96, 512),
        ((500, 500), 84, None),
        ((64, 64), 1, None),
    ],
)
def test_connections_leave_room_for_other_files(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], fits: int, raised: int | None
) -> None:
    changed: list[tuple[int, int]] = []
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, new: changed.append(new))
    assert connections.connections_that_fit(1024) == fits
    assert changed == ([] if raised is None else [(raised, limits[1])])

    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    # What has no hard limit may have one in the kernel.
    monkeypatch.setattr(connections.resource, "setrlimit", refuse)
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (500, resource.RLIM_INFINITY))
    assert connections.connections_that_fit(1024) == 84
