"""Failures of the server as OpenAI's clients read them: a status and one JSON object."""

import math

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from caramba.errors import CarambaError

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
REASONS = {
    400: "a body that is not JSON, an unknown key, a wrong value, or a prompt that does not fit",
    401: "no API key, or a wrong one",
    404: "another model than the one that is served, or no such path",
    405: "another method than this path has",
    408: "the body did not arrive in time",
    413: "the body is larger than the server takes",
    415: "the body is not application/json",
    421: "the Host header names another machine",
    429: "the queue is full; Retry-After gives the time to wait",
    500: "the model failed",
    503: "the server is stopping, or too many connections are open",
    504: "the answer took longer than the server allows",
}

LONGEST_MESSAGE, LONGEST_PARAM = 4000, 200
"""Characters of an answer's message and key: what a client sent is quoted only in part."""


def clip_text(text: str, length: int) -> str:
    """Return a text of at most `length` characters; what is left out is counted."""
    if len(text) <= length:
        return text
    return f"{text[: length - 40]} … ({len(text) - length + 40} more characters)"


class ApiError(CarambaError):
    """A request that gets no answer: the HTTP status, why, and the key at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(clip_text(message, LONGEST_MESSAGE))
        param = None if param is None else clip_text(param, LONGEST_PARAM)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    @property
    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON object that is sent."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return the whole answer."""
        return JSONResponse(self.body, self.status, self.headers)


def queue_full(retry_after_s: float) -> ApiError:
    """Return the answer to a request that finds no place in the queue."""
    seconds = max(1, math.ceil(retry_after_s))
    return ApiError(
        429,
        f"all slots and the queue are taken; ask again in {seconds} s",
        code="queue_full",
        headers={"Retry-After": str(seconds)},
    )


def too_many_connections() -> ApiError:
    """Return the answer to a connection above the server's bound."""
    return ApiError(
        503,
        "too many connections are open; ask again, or send requests on fewer",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )


def framing_refusal(reason: str) -> ApiError:
    """Return the answer to bytes that are not one unambiguous request of HTTP/1.1."""
    return ApiError(400, f"the request is malformed: {reason}; the connection is closed", code="malformed_request")


def stopping() -> ApiError:
    """Return the answer to a request that the server's end cuts off."""
    return ApiError(503, "the server stops; ask again", code="stopping", headers={"Retry-After": "1"})


async def on_api_error(_: Request, error: Exception) -> JSONResponse:
    """Answer a refused request."""
    assert isinstance(error, ApiError)
    return error.response()


async def on_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer what the router refuses: a path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    text = {
        404: f"{path} does not exist; /openapi.json lists what does",
        405: f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, got {method}",
    }.get(error.status_code, error.detail)
    return ApiError(error.status_code, text, headers=dict(error.headers or {})).response()


async def on_crash(_: Request, error: Exception) -> JSONResponse:
    """Answer a request that met an error of the server's own; the traceback goes to its log."""
    return ApiError(500, f"{type(error).__name__}; the server's log has more", code="internal").response()
