"""One request to a language model: plain HTTP to an OpenAI-compatible address, or litellm for all others.

litellm is imported at its first request. It takes seconds to load, and by itself reads `.env` files and fetches a
list of prices; both are switched off here, as are its own retries and telemetry.
"""

from __future__ import annotations

import importlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from caramba.config.paper import ApiConfig, PaperConfig
from caramba.errors import AgentError, ConfigError
from caramba.paper.untrusted import encodable, read_json

MOST_BYTES = 16_000_000
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SECRET = ("_API_KEY", "_TOKEN", "_SECRET")
Send = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes the body of a request and returns that of its answer."""


class StatusError(Exception):
    """An HTTP status that is no success; `litellm_response_headers` as on litellm's own errors."""

    def __init__(self, status: int, text: str, headers: dict[str, str]) -> None:
        super().__init__(text)
        self.status_code, self.litellm_response_headers = status, headers


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another server."""

    def redirect_request(self, *arguments: Any) -> None:
        return None


def open_transport(config: PaperConfig) -> Send:
    """Return what sends requests as configured.

    Raises:
        ConfigError: no key for the address, or a model or key that litellm does not know.
    """
    return _over_http(config) if config.api.base_url is not None else _over_litellm(config)


def read_limits(config: PaperConfig) -> None:
    """Ask a server for its models, which costs nothing: the context of the configured one has to hold a reply.

    Raises:
        ConfigError: nothing answers at the address, or the context cannot hold one reply.
    """
    if config.api.base_url is None:
        return
    try:
        listed = _open(config, "models").get("data")
    except (StatusError, ValueError):
        return  # not every server lists its models
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"paper.api.base_url={config.api.base_url}: no server answers there ({reason}); start it"
        ) from None
    models = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    context = next((item.get("max_model_len") for item in models if item.get("id") == config.model), None)
    if isinstance(context, int) and context <= config.budget.max_reply_tokens:
        raise ConfigError(
            f"paper.budget.max_reply_tokens={config.budget.max_reply_tokens}: {config.model} has a context of "
            f"{context} tokens for prompt and reply; lower it, or serve a longer context"
        )


def _over_http(config: PaperConfig) -> Send:
    _key(config)
    model = config.model.removeprefix("openai/")
    return lambda body: _open(config, "chat/completions", {**body, "model": model})


def _open(config: PaperConfig, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{str(config.api.base_url).rstrip('/')}/{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {_key(config)}"},
    )
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=config.api.timeout_s) as answer:
            content = answer.read(MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        headers = {name.lower(): value for name, value in error.headers.items()}
        raise StatusError(error.code, error.read(4000).decode(errors="replace"), headers) from None
    if len(content) > MOST_BYTES:
        raise AgentError(f"the server's answer is longer than {MOST_BYTES} bytes")
    plain = read_json(content)
    if not isinstance(plain, dict):
        raise ValueError("the server's answer is no JSON object")
    return plain


def _key(config: PaperConfig) -> str:
    """Return the key for an address: a key for another server is not sent to this one."""
    if config.api.key_env is not None:
        return os.environ[config.api.key_env].strip()
    if urlsplit(str(config.api.base_url)).hostname not in _LOOPBACK:
        raise ConfigError(
            f"paper.api.base_url={config.api.base_url}: the name of this server's key is unknown; set api.key_env to "
            "the environment variable that holds it"
        )
    return "none"


def load_litellm() -> Any:
    """Import litellm, quiet and without retries of its own."""
    # Both are read when litellm is imported. A user's own value wins.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = litellm.drop_params = False
    litellm.suppress_debug_info = True
    return litellm


def _over_litellm(config: PaperConfig) -> Send:
    litellm, where = load_litellm(), f"paper.model={config.model}"
    fixed: dict[str, Any] = {"timeout": config.api.timeout_s, "num_retries": 0, "max_retries": 0}
    try:
        litellm.get_llm_provider(config.model)
    except Exception:
        raise ConfigError(
            f"{where}: litellm knows no provider for it; write PROVIDER/MODEL, such as openai/gpt-4o or "
            "anthropic/claude-sonnet-4-5, or set api.base_url to an OpenAI-compatible server"
        ) from None
    if config.api.key_env is not None:
        fixed["api_key"] = os.environ[config.api.key_env].strip()
    else:
        # litellm takes a key that is set to nothing for one that is set.
        names = [name for name, value in os.environ.items() if name.endswith("_KEY") and not value.strip()]
        blank = {name: os.environ.pop(name) for name in names}
        try:
            known = litellm.validate_environment(config.model)
        finally:
            os.environ.update(blank)
        if not known.get("keys_in_environment"):
            missing = ", ".join(known.get("missing_keys") or []) or "its key"
            raise ConfigError(f"{where}: the environment lacks {missing}; export it, or set api.key_env")
    return lambda body: litellm.completion(model=config.model, **body, **fixed).model_dump()


@dataclass(frozen=True)
class Failure:
    """A failed attempt. `was_refused`: the server did not take it, so it costs nothing."""

    text: str
    status: int | None
    may_pass: bool
    was_refused: bool = False
    retry_after: float = 0.0
    user_error: str | None = None


def read_failure(error: Exception, config: PaperConfig) -> Failure:
    """Say what an exception of a request means. litellm's exceptions carry the status that the server gave."""
    name, status = type(error).__name__, getattr(error, "status_code", None)
    if name == "Timeout" or isinstance(error, TimeoutError):
        return Failure(f"no answer within {config.api.timeout_s:g} s", status, True)
    text = f"{name}: {' '.join(_without_keys(str(error), config).split())[:300]}"
    if status is None or name == "APIConnectionError":
        return Failure(f"cannot be reached or answers what cannot be read ({text})", status, True)
    where, key = f"paper.model={config.model}{at_server(config.api)}", "the provider's key"
    key = config.api.shown_key_env if config.api.key_env else key
    refused = f"{where}: the server refused the key ({status}); check {key} [{text}]"
    unknown = f"{where}: the server knows no such model or address ({status}); check model and api.base_url [{text}]"
    was_refused = 400 <= status < 500 and status not in (408, 409)
    headers = getattr(error, "litellm_response_headers", None) or {}  # `response` of these errors is made up
    asked = str(headers.get("retry-after", ""))
    return Failure(
        text, status, status == 429 or not was_refused, was_refused,
        float(asked) if asked.replace(".", "", 1).isdecimal() else 0.0,
        {401: refused, 403: refused, 404: unknown}.get(status),
    )  # fmt: skip


def _without_keys(text: str, config: PaperConfig) -> str:
    """Remove keys from a server's message: some repeat the one that they refuse."""
    secret = [(value.strip(), name) for name, value in os.environ.items()
              if name == config.api.key_env or name.upper().endswith(_SECRET)]  # fmt: skip
    for value, name in sorted(secret, key=lambda item: -len(item[0])):  # one may begin with another
        text = text.replace(value, f"${name}") if len(value) >= 6 else text
    return encodable(text)


def at_server(api: ApiConfig) -> str:
    """Return where the model is asked, for messages."""
    return f" at {api.base_url}" if api.base_url else ""
