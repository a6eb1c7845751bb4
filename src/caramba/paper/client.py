"""The language model: HTTP to an OpenAI-compatible address, or litellm; tools by protocol or as text.

litellm is imported at its first request. It takes seconds to load, and by itself reads `.env` files and fetches a
list of prices; both are switched off here, as are its own retries and telemetry.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from caramba.config.optional_deps import need_library
from caramba.config.paper import PaperConfig
from caramba.console import logger
from caramba.errors import AgentError, ConfigError, fits_header
from caramba.paper.budget import BudgetLedger, Price
from caramba.paper.untrusted import StatusError, encodable, fetch, read_object
from caramba.runs.deadline import run_with_timeout

FIRST_WAIT_S = 1.0
MOST_REASKED = 2
_SECRET = ("_API_KEY", "_TOKEN", "_SECRET")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
Messages = list[dict[str, Any]]
Send = Callable[[dict[str, Any]], dict[str, Any]]
"""Takes the body of a request and returns that of its answer."""


class ModelUnusable(AgentError):  # noqa: N818 - names the event
    """The model does not answer in the form that it is asked for."""


class _ToolsRefused(Exception):  # noqa: N818 - names the event
    """The server takes no tools."""


@dataclass(frozen=True)
class ModelReply:
    """The model's answer as a message with text, tool calls, or both. Tokens are None where they were not counted."""

    message: dict[str, Any]
    prompt_tokens: int | None
    reply_tokens: int | None


class LanguageModel:
    """Asks one model, with tools. Every attempt is reserved in the ledger before it is sent."""

    def __init__(self, config: PaperConfig, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """Check that the model can be asked.

        Raises:
            ConfigError: a library of the extra `paper` is not installed, no key, or a model that litellm does not know.
        """
        self.config, self._sleep = config, sleep
        self._has_text_tools = config.api.tools == "text"
        for library in ("litellm", "pylatexenc", "pybtex", "pypdf")[config.api.base_url is not None :]:
            need_library(library, "paper", "paper")
        self._send = open_transport(config)

    @property
    def name(self) -> str:
        """The model and where it is asked, for messages."""
        return f"{self.config.model} at {self.config.api.base_url}" if self.config.api.base_url else self.config.model

    def price(self) -> Price | None:
        """Return what a token costs: as configured, else as in litellm's own list, None if in neither.

        Raises:
            ConfigError: neither, and the budget has a limit in dollars.
        """
        config, budget = self.config, self.config.budget
        if budget.usd_per_million_prompt is not None and budget.usd_per_million_reply is not None:
            return Price(budget.usd_per_million_prompt / 1e6, budget.usd_per_million_reply / 1e6)
        known = {} if config.api.base_url else load_litellm().model_cost.get(config.model) or {}
        if {"input_cost_per_token", "output_cost_per_token"} <= known.keys():
            return Price(float(known["input_cost_per_token"]), float(known["output_cost_per_token"]))
        if budget.max_cost_usd is not None:
            raise ConfigError(
                f"paper.budget.max_cost_usd={budget.max_cost_usd:g}: what {config.model} costs is not known here; set "
                "budget.usd_per_million_prompt and usd_per_million_reply, or limit max_tokens alone"
            )
        return None

    def ask(self, messages: Messages, tools: Messages, ledger: BudgetLedger, save: Callable[[], None]) -> ModelReply:
        """Return the model's reply; `save` puts on disk what is reserved, before it is sent.

        Raises:
            ConfigError: the server refuses the key, the model, or the address.
            AgentError: it refuses the request, fails on every attempt, or never answers in form (ModelUnusable).
            BudgetExceeded: an attempt would cross a limit.
        """
        attempt = functools.partial(self._attempt, ledger, save)
        if not (self._has_text_tools and tools):
            try:
                return attempt(messages, tools)
            except _ToolsRefused:
                self._has_text_tools = True
        conversation = as_text(messages, tools)
        for _ in range(MOST_REASKED + 1):
            reply = attempt(conversation, [])
            try:
                return dataclasses.replace(reply, message=read_calls(reply.message["content"]))
            except AgentError as error:
                asked = f"{error}; answer with one JSON object as described, and nothing else"
                conversation += [reply.message, {"role": "user", "content": asked}]
        raise ModelUnusable(
            f"{self.name}: {MOST_REASKED + 1} answers without a call in JSON; take a model that follows a schema"
        )

    def _attempt(
        self, ledger: BudgetLedger, save: Callable[[], None], messages: Messages, tools: Messages
    ) -> ModelReply:
        """Send a request until it is answered, refused, or was tried as often as allowed."""
        config, api = self.config, self.config.api
        body: dict[str, Any] = {"messages": messages, "max_tokens": config.budget.max_reply_tokens}
        body |= {"tools": tools, "tool_choice": "auto"} if tools else {}
        body |= {} if config.temperature is None else {"temperature": config.temperature}
        for attempt in itertools.count(1):
            reserved = ledger.reserve(messages, tools)
            save()
            try:
                reply = _read(run_with_timeout(api.timeout_s, lambda: self._send(body)))
                ledger.record_usage(reserved, reply.prompt_tokens, reply.reply_tokens)
                return reply
            except Exception as error:
                text, status, asked_s = _read_failure(error, config)
                # What the server did not take costs nothing.
                was_refused = status is not None and 400 <= status < 500 and status not in (408, 409)
                if was_refused:
                    ledger.release(reserved)
                logger.warning(f"paper: attempt {attempt} of a request failed: {text}")
                if tools and status in (400, 422) and api.tools == "auto" and "tool" in text:
                    raise _ToolsRefused from None
                may_pass = status == 429 or not was_refused
                if not may_pass or attempt > api.retries:
                    tries = f" (attempt {attempt} of {api.retries + 1})" if may_pass else ""
                    raise self._refusal(text, status, tries) from None
                wait = max(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5), asked_s)
                self._sleep(min(wait, api.max_wait_s))
        raise AssertionError("unreachable")

    def _refusal(self, text: str, status: int | None, tries: str) -> AgentError | ConfigError:
        """Return what a failed attempt means that is the last one."""
        if status in (401, 403):
            key = self.config.api.shown_key_env if self.config.api.key_env else "the provider's key"
            wrong = f"the server refused the key ({status}); check {key}"
        elif status == 404:
            wrong = f"the server knows no such model or address ({status}); check model and api.base_url"
        else:
            return AgentError(f"{self.name}: {text}{tries}")
        return ConfigError(f"paper.model={self.name}: {wrong} [{text}]")


def _read(answer: dict[str, Any]) -> ModelReply:
    """Return a response as text that can be saved; one without a choice is an AgentError."""
    try:
        message, usage = answer["choices"][0]["message"], answer.get("usage") or {}
        calls = [(call.get("id"), call["function"]["name"], call["function"].get("arguments"))
                 for call in message.get("tool_calls") or []]  # fmt: skip
        read = _message(message.get("content"), calls)
    except (KeyError, IndexError, TypeError, AttributeError):
        raise AgentError("the server's answer holds no choice that can be read") from None
    prompt, reply = usage.get("prompt_tokens") or 0, usage.get("completion_tokens", 0)
    is_counted = isinstance(prompt, int) and isinstance(reply, int) and prompt > 0 and reply >= 0
    return ModelReply(read, *((prompt, reply) if is_counted else (None, None)))


def _message(text: Any, calls: Iterable[tuple[Any, str, Any]]) -> dict[str, Any]:
    """Return a message of text that can be saved, with calls of an id, a name and arguments, JSON or not."""
    made: dict[str, dict[str, Any]] = {}
    for index, (given, name, arguments) in enumerate(calls):
        identity = encodable(str(given or f"call_{index}"))
        identity = f"{identity}_{index}" if identity in made else identity
        function = {"name": encodable(str(name)), "arguments": encodable(str(arguments or ""))}
        made[identity] = {"id": identity, "type": "function", "function": function}
    content = {"role": "assistant", "content": encodable(str(text or ""))}
    return {**content, "tool_calls": list(made.values())} if made else content


_ASKED = (
    "Answer with one JSON object and nothing else. To call tools: "
    '{"calls": [{"name": NAME, "arguments": {...}}]}, or, when you are done, {"text": WORDS}. Tools:\n'
)


def as_text(messages: Messages, tools: Messages) -> Messages:
    """Return a conversation without tool calls: one system message, then user and assistant in turn."""
    schemas = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    found: Messages = []
    for message in messages:
        role, text = message["role"], str(message["content"] or "")
        if role == "system":
            text = f"{text}\n\n{_ASKED}{schemas}"
        elif role == "assistant":
            made = [call["function"] for call in message.get("tool_calls", [])]
            calls = ", ".join(
                f'{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}' for call in made
            )
            text = f'{{"calls": [{calls}]}}' if made else json.dumps({"text": text}, ensure_ascii=False)
        elif role == "tool":
            role, text = "user", f"Result of {message['tool_call_id']}: {text}"
        if found and role == "user" == found[-1]["role"]:
            found[-1]["content"] += f"\n{text}"
        else:
            found.append({"role": role, "content": text})
    return found


def read_calls(text: str) -> dict[str, Any]:
    """Return an answer with the calls that it makes as a message of the chat-completions protocol.

    Raises:
        AgentError: the answer is not of the form that was asked for; the message is for the model.
    """
    plain = read_object(text, "the answer")
    try:
        calls = [(None, call["name"], json.dumps(call.get("arguments") or {}, ensure_ascii=False))
                 for call in plain.get("calls") or []]  # fmt: skip
    except (KeyError, TypeError, AttributeError):
        raise AgentError("calls is no list of objects with a name and arguments") from None
    if not plain.keys() & {"calls", "text"}:
        raise AgentError("the object has neither calls nor text")
    return _message(plain.get("text"), calls)


def read_limits(config: PaperConfig) -> None:
    """Ask a server for its models, which costs nothing: the context of the configured one has to hold a reply.

    Raises:
        ConfigError: nothing answers at the address, or the context cannot hold one reply.
    """
    if config.api.base_url is None:
        return
    try:
        listed = _open(config, "models").get("data") or []
        context = next((item.get("max_model_len") for item in listed if item.get("id") == config.model), None)
    except (StatusError, AgentError, ValueError, TypeError, AttributeError):
        return  # not every server lists its models
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(
            f"paper.api.base_url={config.api.base_url}: no server answers there ({reason}); start it"
        ) from None
    if isinstance(context, int) and context <= config.budget.max_reply_tokens:
        raise ConfigError(
            f"paper.budget.max_reply_tokens={config.budget.max_reply_tokens}: {config.model} has a context of "
            f"{context} tokens for prompt and reply; lower it, or serve a longer context"
        )


def _open(config: PaperConfig, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_own_key(config) or 'none'}"}
    url = f"{str(config.api.base_url).rstrip('/')}/{path}"
    return read_object(fetch(url, headers, body, timeout_s=config.api.timeout_s).decode(errors="replace"), url)


def load_litellm() -> Any:
    """Import litellm, quiet and without retries of its own."""
    # Both are read when litellm is imported. A user's own value wins.
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    os.environ.setdefault("LITELLM_MODE", "PRODUCTION")
    litellm: Any = importlib.import_module("litellm")
    litellm.telemetry = litellm.drop_params = False
    litellm.suppress_debug_info = True
    return litellm


def open_transport(config: PaperConfig) -> Send:
    """Return what sends requests as configured.

    Raises:
        ConfigError: no key for the address, or a model or key that litellm does not know.
    """
    key, where = _own_key(config), f"paper.model={config.model}"
    if config.api.base_url is not None:
        # A key for another server is not sent to this one.
        if key is None and urlsplit(config.api.base_url).hostname not in _LOOPBACK:
            raise ConfigError(
                f"paper.api.base_url={config.api.base_url}: the name of this server's key is unknown; set api.key_env "
                "to the environment variable that holds it"
            )
        model = config.model.removeprefix("openai/")
        return lambda body: _open(config, "chat/completions", {**body, "model": model})
    litellm = load_litellm()
    try:
        usual = f"{litellm.get_llm_provider(config.model)[1].upper()}_API_KEY"
    except Exception:
        raise ConfigError(
            f"{where}: litellm knows no provider for it; write PROVIDER/MODEL, such as openai/gpt-4o or "
            "anthropic/claude-sonnet-4-5, or set api.base_url to an OpenAI-compatible server"
        ) from None
    known, is_blank = litellm.validate_environment(config.model), os.environ.get(usual, usual).strip() == ""
    if key is None and (is_blank or not known.get("keys_in_environment")):
        missing = usual if is_blank else ", ".join(known.get("missing_keys") or []) or "its key"
        raise ConfigError(f"{where}: the environment lacks {missing}; export it, or set api.key_env")
    fixed = {"timeout": config.api.timeout_s, "num_retries": 0, "max_retries": 0, **({"api_key": key} if key else {})}
    return lambda body: litellm.completion(model=config.model, **body, **fixed).model_dump()


def _own_key(config: PaperConfig) -> str | None:
    """Return the key whose variable is configured, None where none is; refuse one that no header carries."""
    if config.api.key_env is None:
        return None
    held, name = os.environ.get(config.api.key_env, "").strip(), config.api.shown_key_env
    if fits_header(held):
        return held
    wrong = f"no such variable is set; export {name.replace('…', 'NAME')}=… and give its name, not the key"
    if held:
        wrong = "the variable holds blanks or characters that a header cannot carry; export the server's key, in ASCII"
    raise ConfigError(f"paper.api.key_env={name}: {wrong}")


def _read_failure(error: Exception, config: PaperConfig) -> tuple[str, int | None, float]:
    """Return what an exception of a request means, its status, and the seconds that the server asks to wait.

    litellm's exceptions carry the status that the server gave.
    """
    name, status = type(error).__name__, getattr(error, "status_code", None)
    text = str(error)
    for variable, key in os.environ.items():  # some servers repeat the one that they refuse
        if key.strip() and (variable == config.api.key_env or variable.upper().endswith(_SECRET)):
            text = text.replace(key.strip(), f"${variable}")
    text = f"{name}: {' '.join(encodable(text).split())[:300]}"
    if status is None or name == "APIConnectionError":
        text = f"cannot be reached or answers what cannot be read ({text})"
    headers = getattr(error, "litellm_response_headers", None) or {}  # `response` of these errors is made up
    asked = str(headers.get("retry-after", ""))
    return text, status, float(asked) if asked.replace(".", "", 1).isdecimal() else 0.0
