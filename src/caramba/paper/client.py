"""The language model behind litellm: one request, bounded attempts, and errors that say what to change.

litellm is imported at the first request. It takes seconds to load, and by itself reads `.env` files and fetches a
list of prices; both are switched off here, as are its own retries and telemetry.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from caramba.config.optional_deps import need_library
from caramba.config.paper import PaperConfig
from caramba.errors import AgentError, ConfigError
from caramba.paper.budget import WAY_ON, BudgetLedger, Price
from caramba.paper.failure import at_server, read_failure
from caramba.paper.untrusted import encodable
from caramba.runs.deadline import run_with_timeout

FIRST_WAIT_S = 1.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for; `arguments` is the text it wrote, JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ModelReply:
    """The model's answer: text, tool calls, or both. Tokens are None where the server did not count them."""

    text: str
    calls: tuple[ToolCall, ...]
    finish: str
    prompt_tokens: int | None
    reply_tokens: int | None

    def message(self) -> dict[str, Any]:
        """Return it as a message of the conversation."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


def need_model(config: PaperConfig, where: str) -> None:
    """Refuse, before anything is loaded or sent, when the model cannot be asked from here.

    Raises:
        ConfigError: a library of the extra `paper` is not installed, or the named variable holds no key.
    """
    need_library("litellm", "paper", where)
    for library in ("pylatexenc", "pybtex", "pypdf"):
        need_library(library, "paper", where)
    key = config.api.key_env
    if key is not None and not os.environ.get(key, "").strip():
        shown = config.api.shown_key_env
        name = shown if shown != "…" else "NAME"
        raise ConfigError(
            f"{where}.api.key_env={shown}: no such variable is set; export {name}=… and give its name, not the key"
        )


def check_model(config: PaperConfig) -> None:
    """Check, before anything is trained, all that a draft would refuse of its model: its name, its key, its price.

    Raises:
        ConfigError: as `LanguageModel` and its `price`.
    """
    LanguageModel(config).price()


class LanguageModel:
    """Asks one model, with tools. Every attempt is reserved in the ledger before it is sent."""

    def __init__(
        self, config: PaperConfig, *, sleep: Callable[[float], None] = time.sleep, way_on: str = WAY_ON
    ) -> None:
        """Load litellm and check that the model can be named.

        Raises:
            ConfigError: no litellm, no key, or a model that litellm does not know.
        """
        need_model(config, "paper")
        self.config, self._sleep, self._way_on = config, sleep, way_on
        self._litellm = _load()
        self._options = _options(config, self._litellm)

    def price(self) -> Price | None:
        """Return what a token costs: as configured, else as in litellm's own list, None if in neither."""
        budget = self.config.budget
        if budget.usd_per_million_prompt is not None and budget.usd_per_million_reply is not None:
            return Price(budget.usd_per_million_prompt / 1e6, budget.usd_per_million_reply / 1e6)
        known = None if self.config.api.base_url else self._litellm.model_cost.get(self._options["model"])
        known = known or {}
        prompt, reply = known.get("input_cost_per_token"), known.get("output_cost_per_token")
        if prompt is None or reply is None:
            if budget.max_cost_usd is not None:
                raise ConfigError(
                    f"paper.budget.max_cost_usd={budget.max_cost_usd:g}: what {self.config.model} costs is not known "
                    "here; set budget.usd_per_million_prompt and usd_per_million_reply, or limit max_tokens alone"
                )
            return None
        return Price(float(prompt), float(reply))

    def ask(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        ledger: BudgetLedger,
        record: Callable[..., None],
    ) -> ModelReply:
        """Return the model's reply; `record` gets every attempt before it is sent and after it failed.

        Raises:
            ConfigError: the server refuses the key, the model, or the address.
            AgentError: it refuses the request, or fails on every attempt.
            BudgetExceeded: an attempt would cross a limit.
        """
        attempts = self.config.api.retries + 1
        for attempt in range(1, attempts + 1):
            reserved = ledger.reserve(messages, tools)
            record("attempt", attempt=attempt, reserved_tokens=reserved.prompt_tokens + reserved.reply_tokens)
            try:
                reply = _read(
                    run_with_timeout(self.config.api.timeout_s, lambda: self._complete(messages, tools))
                )
            except Exception as error:
                failure = read_failure(error, self.config)
                if failure.was_refused:
                    ledger.release(reserved)
                record("attempt_failed", attempt=attempt, error=failure.text, status=failure.status)
                if failure.user_error is not None:
                    raise ConfigError(failure.user_error) from None
                if not failure.may_pass or attempt == attempts:
                    tries = f" (attempt {attempt} of {attempts})" if failure.may_pass else ""
                    raise AgentError(
                        f"{self.config.model}{at_server(self.config.api)}: {failure.text}{tries}; the draft is kept, "
                        f"resume with {self._way_on}"
                    ) from None
                self._sleep(self._wait(attempt, failure.retry_after))
            else:
                ledger.record_usage(reserved, reply.prompt_tokens, reply.reply_tokens)
                return reply
        raise AssertionError("unreachable")

    def _complete(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        return self._litellm.completion(messages=messages, tools=tools, **self._options)

    def _wait(self, attempt: int, asked: float | None) -> float:
        wait = FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
        return min(max(wait, asked or 0.0), self.config.api.max_wait_s)


def _load() -> Any:
    # Both are read when litellm is imported. A user's own value wins.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    litellm.drop_params = False
    return litellm


def _options(config: PaperConfig, litellm: Any) -> dict[str, Any]:
    api = config.api
    options: dict[str, Any] = {
        "model": config.model,
        "timeout": api.timeout_s,
        "num_retries": 0,
        "max_retries": 0,
        "max_tokens": config.budget.max_reply_tokens,
        "tool_choice": "auto",
    }
    if config.temperature is not None:
        options["temperature"] = config.temperature
    if api.key_env is not None:
        options["api_key"] = os.environ[api.key_env].strip()
    if api.base_url is not None:
        options |= {"api_base": api.base_url, "custom_llm_provider": "openai"}
        options["model"] = config.model.removeprefix("openai/")
        if api.key_env is None:
            # A key for another server is not sent to this one.
            if urlsplit(api.base_url).hostname not in _LOOPBACK:
                raise ConfigError(
                    f"paper.api.base_url={api.base_url}: the name of this server's key is unknown; set api.key_env to "
                    "the environment variable that holds it"
                )
            options["api_key"] = "none"
        return options
    try:
        litellm.get_llm_provider(config.model)
    except Exception:
        raise ConfigError(
            f"paper.model={config.model}: litellm knows no provider for it; write PROVIDER/MODEL, such as "
            "openai/gpt-4o or anthropic/claude-sonnet-4-5, or set api.base_url to an OpenAI-compatible server"
        ) from None
    if api.key_env is None:
        with _without_blank_keys():
            found = litellm.validate_environment(config.model)
        if not found.get("keys_in_environment"):
            missing = ", ".join(found.get("missing_keys") or []) or "its key"
            raise ConfigError(
                f"paper.model={config.model}: the environment lacks {missing}; export it, or set api.key_env"
            )
    return options


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


def _read(answer: Any) -> ModelReply:
    """Return a response as a reply.

    Raises:
        AgentError: it holds no choice.
    """
    if not getattr(answer, "choices", None):
        raise AgentError("the server's answer holds no choice")
    choice = answer.choices[0]
    calls: list[ToolCall] = []
    for index, call in enumerate(choice.message.tool_calls or []):
        identity = encodable(str(call.id or f"call_{index}"))
        if any(identity == other.id for other in calls):
            identity = f"{identity}_{index}"  # each call has an answer of its own
        name, text = str(call.function.name or ""), str(call.function.arguments or "")
        calls.append(ToolCall(identity, encodable(name), encodable(text)))
    usage = getattr(answer, "usage", None)
    prompt, reply = getattr(usage, "prompt_tokens", 0), getattr(usage, "completion_tokens", 0)
    is_counted = isinstance(prompt, int) and isinstance(reply, int) and prompt > 0 and reply >= 0
    return ModelReply(
        encodable(str(choice.message.content or "")),
        tuple(calls),
        encodable(str(choice.finish_reason or "")),
        prompt if is_counted else None,
        reply if is_counted else None,
    )
