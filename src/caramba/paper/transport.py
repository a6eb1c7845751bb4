"""One request to a language model: plain HTTP to an OpenAI-compatible address, or litellm for all others.

litellm is imported at its first request. It takes seconds to load, and by itself reads `.env` files and fetches a
list of prices; both are switched off here, as are its own retries and telemetry.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from caramba.config.paper import PaperConfig
from caramba.errors import AgentError, ConfigError
from caramba.paper.untrusted import read_json

MOST_BYTES = 16_000_000
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
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


def read_limits(config: PaperConfig) -> int | None:
    """Ask a server for its models, which costs nothing, and return the context of the configured one where it tells.

    Raises:
        ConfigError: nothing answers at the address, or the context cannot hold one reply.
    """
    url = config.api.base_url
    if url is None:
        return None
    headers = {"Authorization": f"Bearer {_key(config)}"}
    try:
        plain = _open(
            urllib.request.Request(f"{url.rstrip('/')}/models", headers=headers), config.api.timeout_s
        )
    except (StatusError, ValueError):
        return None  # not every server lists its models
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"paper.api.base_url={url}: no server answers there ({reason}); start it") from None
    listed = plain.get("data")
    models = listed if isinstance(listed, list) else []
    found = [
        item.get("max_model_len")
        for item in models
        if isinstance(item, dict) and item.get("id") == config.model
    ]
    context = found[0] if found and isinstance(found[0], int) else None
    if context is not None and context <= config.budget.max_reply_tokens:
        raise ConfigError(
            f"paper.budget.max_reply_tokens={config.budget.max_reply_tokens}: {config.model} has a context of "
            f"{context} tokens for prompt and reply; lower it, or serve a longer context"
        )
    return context


def _over_http(config: PaperConfig) -> Send:
    url, key = f"{str(config.api.base_url).rstrip('/')}/chat/completions", _key(config)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def send(body: dict[str, Any]) -> dict[str, Any]:
        body = {**body, "model": config.model.removeprefix("openai/")}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        return _open(request, config.api.timeout_s)

    return send


def _open(request: urllib.request.Request, timeout_s: float) -> dict[str, Any]:
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=timeout_s) as answer:
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
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    litellm.drop_params = False
    return litellm


def _over_litellm(config: PaperConfig) -> Send:
    litellm = load_litellm()
    fixed: dict[str, Any] = {"timeout": config.api.timeout_s, "num_retries": 0, "max_retries": 0}
    if config.api.key_env is not None:
        fixed["api_key"] = os.environ[config.api.key_env].strip()
    try:
        litellm.get_llm_provider(config.model)
    except Exception:
        raise ConfigError(
            f"paper.model={config.model}: litellm knows no provider for it; write PROVIDER/MODEL, such as "
            "openai/gpt-4o or anthropic/claude-sonnet-4-5, or set api.base_url to an OpenAI-compatible server"
        ) from None
    if config.api.key_env is None:
        with _without_blank_keys():
            found = litellm.validate_environment(config.model)
        if not found.get("keys_in_environment"):
            missing = ", ".join(found.get("missing_keys") or []) or "its key"
            raise ConfigError(
                f"paper.model={config.model}: the environment lacks {missing}; export it, or set api.key_env"
            )
    return lambda body: litellm.completion(model=config.model, **body, **fixed).model_dump()


@contextlib.contextmanager
def _without_blank_keys() -> Iterator[None]:
    """Take keys that are set to nothing for keys that are not set, which litellm does not."""
    blank = {name: value for name, value in os.environ.items() if name.endswith("_KEY") and not value.strip()}
    for name in blank:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(blank)
