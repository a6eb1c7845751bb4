"""Checks before every request: the key, the Host header, the size of the body, and the count of answers."""

import asyncio
import contextlib
import gc
import ipaddress
import re
import secrets
from collections.abc import Iterator

from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from caramba.serve.failure import ApiError
from caramba.serve.metrics import Metrics

HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")
BODY_SECONDS = 30.0
DRAINED = 8  # times the limit that is read and dropped, so that the client gets to read why it is refused
OPEN_PATHS = ("/health",)  # probes have no key


class Guard:
    """Middleware that answers what may not pass and counts every answer.

    With a key every path but /health needs it. Without one the server listens on loopback, and a request must name
    it: a page in a browser cannot reach it under a name that was pointed at 127.0.0.1 after the page was loaded.
    """

    def __init__(self, app: ASGIApp, *, key: str | None, paths: frozenset[str], metrics: Metrics) -> None:
        self.app, self.paths, self.metrics = app, paths, metrics
        self.key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self.paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        refusal = self._refusal(scope["path"], Headers(scope=scope))
        await (self.app if refusal is None else refusal.response())(scope, receive, counted)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if self.key is None:
            host = headers.get("host", "")
            if is_loopback(host_name(host)):
                return None
            return ApiError(421, f"Host {host!r} is not this machine's loopback; ask 127.0.0.1 or localhost")
        if path in OPEN_PATHS:
            return None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and secrets.compare_digest(given.strip().encode(), self.key):
            return None
        return ApiError(
            401,
            "no valid API key; send the header `Authorization: Bearer KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def host_name(host: str) -> str:
    """Return the name in a Host header, without port and brackets; nothing where it is no host (RFC 9110, 7.2)."""
    match = HOST.fullmatch(host)
    return "" if match is None else match["address"] or match["name"]


def is_loopback(name: str) -> bool:
    """Return whether a host name or address can only be this machine."""
    if name.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


async def read_json(request: Request, limit: int) -> object:
    """Return the JSON value of a body.

    Raises:
        ApiError: another content type, a body above `limit` bytes, one that does not arrive, or no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type is {kind or 'missing'}, expected application/json")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await _read(request, limit)
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was whole") from None
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s") from None
    try:
        with _gc_paused():
            return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="malformed_json") from None


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause the collection of cycles: JSON has none, and collecting takes three quarters of parsing nested lists."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def _read(request: Request, limit: int) -> bytes:
    kept, n_bytes = bytearray(), 0
    async for chunk in request.stream():
        n_bytes += len(chunk)
        if n_bytes <= limit:
            kept += chunk
        elif n_bytes > DRAINED * limit:
            break
    if n_bytes > limit:
        raise ApiError(413, f"the body is larger than {limit} bytes; send less", code="request_too_large")
    return bytes(kept)
