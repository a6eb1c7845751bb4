"""Connections without a whole request end; those that have one are answered, however long that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from caramba.serve import connections

LIMIT, REQUEST = 0.4, b"GET /%s HTTP/1.1\r\nHost: a\r\n\r\n"
Address = tuple[str, int]


async def answer(scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * LIMIT)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def served(talk: Callable[[Address], Awaitable[None]]) -> None:
    """Run a conversation with a server of `TimedProtocol`."""

    async def run() -> None:
        config = uvicorn.Config(
            answer, port=0, lifespan="off", http=connections.TimedProtocol, ws="none", log_config=None,
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
    assert await asyncio.wait_for(reader.read(), 20 * LIMIT) == b""
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
        drops = [bytes([byte]) for byte in b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 400]
        found = await asyncio.gather(
            seconds_open(address),
            seconds_open(address, REQUEST[:12]),
            seconds_open(address, *drops, every=LIMIT / 20),
        )
        assert all(LIMIT / 2 < spent < 6 * LIMIT for spent in found), found

    served(talk)


def test_requests_are_answered_however_long_that_takes_and_the_next_head_is_timed_again() -> None:
    async def talk(address: Address) -> None:
        reader, writer = await asyncio.open_connection(*address)
        for path in (b"slow", b"quick"):
            writer.write(REQUEST % path)
            assert (await asyncio.wait_for(reader.readuntil(b"ok"), 20 * LIMIT)).startswith(b"HTTP/1.1 200")
        await asyncio.sleep(2 * LIMIT)  # between requests uvicorn's own limit holds
        writer.write(REQUEST % b"quick")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(REQUEST[:9])
        began = time.monotonic()
        assert await asyncio.wait_for(reader.read(), 20 * LIMIT) == b""
        assert LIMIT / 2 < time.monotonic() - began < 6 * LIMIT
        writer.close()

    served(talk)
