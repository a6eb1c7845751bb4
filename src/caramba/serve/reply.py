"""Sends an answer, whole or as server-sent events, and cancels it when nobody waits or it takes too long."""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from caramba.serve.failure import ApiError
from caramba.serve.running import ActiveRequest, ClientGone
from caramba.serve.schema import Finish
from caramba.serve.shapes import Shape

NONE = b'"logprobs":null'
"""No text of an answer holds it: JSON escapes every quotation mark inside a string."""


class LogprobText:
    """The `logprobs` of an answer. It keeps text, not objects: 4,000 tokens with 20 alternatives are 80,000 objects,
    and to write them in one call, or to collect garbage among them, would stop the other requests of the process."""

    def __init__(self) -> None:
        self._items: dict[str, list[bytes] | None] = {}

    def add(self, logprobs: BaseModel) -> None:
        """Append the lists of one piece; a field that is null stays so."""
        values: Mapping[str, Any] = {name: getattr(logprobs, name) for name in type(logprobs).model_fields}
        for name, value in values.items():
            written = self._items.setdefault(name, None if value is None else [])
            if value and written is not None:
                written.append(to_json(value, inf_nan_mode="null")[1:-1])

    def put_into(self, answer: BaseModel) -> bytes:
        """Return the JSON of an answer of one choice without log-probabilities, with these in their place."""
        text = answer.model_dump_json().encode()
        if not self._items:
            return text
        fields = (
            to_json(name) + b":" + (b"null" if written is None else b"[" + b",".join(written) + b"]")
            for name, written in self._items.items()
        )
        head, _, tail = text.partition(NONE)
        return head + b'"logprobs":{' + b",".join(fields) + b"}" + tail


LAST_WORD_SECONDS = 1.0
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy hands events on as they come
)


class Reply:
    """The response of one running request. The slot is free as soon as it returns, however it ends."""

    def __init__(self, running: ActiveRequest, shape: Shape, timeout_s: float) -> None:
        self.running, self.shape, self.timeout_s = running, shape, timeout_s
        self.is_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""

        async def noted(message: Message) -> None:
            self.is_begun = True
            await send(message)

        watch = asyncio.create_task(self._watch(receive))
        try:
            async with asyncio.timeout(self.timeout_s):
                await self._answer(scope, receive, noted)
        except TimeoutError:
            await self._last_word(_too_long(self.timeout_s), scope, receive, send)
        except ApiError as error:
            await self._last_word(error, scope, receive, send)
        except ClientGone:
            pass  # there is nobody to tell
        finally:
            self.running.cancel()
            watch.cancel()

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.running.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts: list[str] = []
        finish: Finish | None = None
        logprobs = LogprobText()
        async for piece in self.running.stream_text():
            parts.append(piece.text)
            finish = piece.finish
            if (some := self.shape.logprobs(piece.sampled)) is not None:
                logprobs.add(some)
        assert finish is not None
        answer = self.shape.whole("".join(parts), finish, self.running.usage)
        await Response(logprobs.put_into(answer), media_type="application/json")(scope, receive, send)

    async def _last_word(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(TimeoutError):  # one that does not read is cut off
            async with asyncio.timeout(LAST_WORD_SECONDS):
                if self.is_begun:
                    await self._break_off(error, send)
                else:  # until the first token a failure has its own status
                    await error.response()(scope, receive, send)

    async def _break_off(self, error: ApiError, send: Send) -> None:
        """End an answer of which a part is sent: without its end, so that the client sees that it is not whole."""


class EventStream(Reply):
    """The same as events: `data:` and a chunk each, at the end `data: [DONE]`, or an error instead of it."""

    def __init__(
        self, running: ActiveRequest, shape: Shape, timeout_s: float, *, with_usage: bool, with_tokens: bool
    ) -> None:
        super().__init__(running, shape, timeout_s)
        self.with_usage, self.with_tokens = with_usage, with_tokens

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for piece in self.running.stream_text():
            if not self.is_begun:
                await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_STREAM)})
                await self._send(send, *self.shape.opening())
            if piece.text or piece.finish is not None or self.with_tokens:
                await self._send(send, self.shape.chunk(piece))
        if self.with_usage:
            await self._send(send, self.shape.usage(self.running.usage))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _send(self, send: Send, *chunks: BaseModel) -> None:
        body = b"".join(b"data: " + chunk.model_dump_json().encode() + b"\n\n" for chunk in chunks)
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _break_off(self, error: ApiError, send: Send) -> None:
        event = b"data: " + bytes(error.response().body) + b"\n\n"
        await send({"type": "http.response.body", "body": event})


def _too_long(timeout_s: float) -> ApiError:
    return ApiError(504, f"the answer took longer than the {timeout_s:g} s that this server allows", code="timeout")
