"""What a request that failed means: whether it may pass later, what it costs, and what its user should change."""

from __future__ import annotations

import os
from dataclasses import dataclass
from http.client import HTTPException

from caramba.config.paper import ApiConfig, PaperConfig
from caramba.errors import AgentError
from caramba.paper.untrusted import encodable

_SECRET = ("_API_KEY", "_TOKEN", "_SECRET")


@dataclass(frozen=True)
class Failure:
    """A failed attempt. `was_refused`: the server did not take it, so it costs nothing."""

    text: str
    status: int | None
    may_pass: bool
    was_refused: bool = False
    retry_after: float | None = None
    user_error: str | None = None


def read_failure(error: Exception, config: PaperConfig) -> Failure:
    """Say what an exception of a request means. litellm's exceptions carry the status that the server gave."""
    name = type(error).__name__
    status = getattr(error, "status_code", None)
    text = f"{name}: {' '.join(_without_keys(str(error), config).split())[:300]}"
    where = f"paper.model={config.model}{at_server(config.api)}"
    if name == "Timeout" or isinstance(error, TimeoutError):
        return Failure(f"no answer within {config.api.timeout_s:g} s", status, True)
    if name == "AuthenticationError" or status in (401, 403):
        key = config.api.shown_key_env if config.api.key_env else "the provider's key"
        return Failure(
            text,
            status,
            False,
            True,
            user_error=f"{where}: the server refused the key ({status}); check {key} [{text}]",
        )
    if name == "NotFoundError" or status == 404:
        return Failure(
            text, status, False, True,
            user_error=f"{where}: the server knows no such model or address ({status}); check model and api.base_url "
            f"[{text}]",
        )  # fmt: skip
    is_cut_off = isinstance(error, OSError | ValueError | AgentError | HTTPException)
    if name == "APIConnectionError" or is_cut_off or (name == "InternalServerError" and "onnection" in text):
        return Failure(f"cannot be reached or answers what cannot be read ({text})", status, True)
    if name == "RateLimitError" or status == 429:
        return Failure(text, status, True, True, _retry_after(error))
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 409):
        return Failure(text, status, False, True)
    return Failure(text, status, True, False, _retry_after(error))


def _without_keys(text: str, config: PaperConfig) -> str:
    """Remove keys from a server's message: some repeat the one that they refuse."""
    secret = [
        (value.strip(), name)
        for name, value in os.environ.items()
        if name == config.api.key_env or name.upper().endswith(_SECRET)
    ]
    for value, name in sorted(secret, key=lambda item: -len(item[0])):  # one may begin with another
        if len(value) >= 6:
            text = text.replace(value, f"${name}")
    return encodable(text)


def _retry_after(error: Exception) -> float | None:
    headers = getattr(error, "litellm_response_headers", None) or {}  # `response` of these errors is made up
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except (TypeError, ValueError):
        return None


def at_server(api: ApiConfig) -> str:
    """Return where the model is asked, for messages."""
    return f" at {api.base_url}" if api.base_url else ""
