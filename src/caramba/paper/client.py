"""The language model: bounded attempts, tools by protocol or as text, recorded replies, errors with what to change."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from caramba.config.optional_deps import need_library
from caramba.config.paper import PaperConfig
from caramba.errors import AgentError, ConfigError, fits_header
from caramba.paper.budget import WAY_ON, BudgetLedger, Price
from caramba.paper.journal import Journal
from caramba.paper.text_tools import as_text, read_calls
from caramba.paper.transport import Failure, at_server, load_litellm, open_transport, read_failure
from caramba.paper.untrusted import encodable
from caramba.runs.deadline import run_with_timeout

FIRST_WAIT_S = 1.0
MOST_REASKED = 2
Messages = list[dict[str, Any]]


class ModelUnusable(AgentError):  # noqa: N818 - names the event
    """The model does not answer in the form that it is asked for."""


class _ToolsRefused(Exception):  # noqa: N818 - names the event
    """The server takes no tools."""


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
        calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                 for call in self.calls]  # fmt: skip
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


def need_model(config: PaperConfig, where: str) -> None:
    """Refuse, before anything is loaded or sent, when the model cannot be asked from here.

    Raises:
        ConfigError: a library of the extra `paper` is not installed, or the named variable holds no key, or one that no
            header carries.
    """
    own = () if config.api.base_url is not None else ("litellm",)
    for library in (*own, "pylatexenc", "pybtex", "pypdf"):
        need_library(library, "paper", where)
    if config.api.key_env is None:
        return
    shown, held = config.api.shown_key_env, os.environ.get(config.api.key_env, "").strip()
    if not held:
        name = shown if shown != "…" else "NAME"
        wrong = f"no such variable is set; export {name}=… and give its name, not the key"
    elif not fits_header(held):
        wrong = (
            "the variable holds blanks or characters that a header cannot carry; export the key as the server has it, "
            "in ASCII"
        )
    else:
        return
    raise ConfigError(f"{where}.api.key_env={shown}: {wrong}")


class LanguageModel:
    """Asks one model, with tools. Every attempt is reserved in the ledger before it is sent."""

    def __init__(
        self,
        config: PaperConfig,
        *,
        sleep: Callable[[float], None] = time.sleep,
        way_on: str = WAY_ON,
        journal: Journal | None = None,
    ) -> None:
        """Check that the model can be asked; with a `journal`, replies that it holds are not asked for again.

        Raises:
            ConfigError: no litellm, no key, or a model that litellm does not know.
        """
        self.config, self._sleep, self._way_on, self.journal = config, sleep, way_on, journal
        self._is_replay = journal is not None and journal.replay is not None
        self._has_text_tools = config.api.tools == "text"
        if not self._is_replay:
            need_model(config, "paper")
            self._send = open_transport(config)

    def price(self) -> Price | None:
        """Return what a token costs: as configured, else as in litellm's own list, None if in neither.

        Raises:
            ConfigError: neither, and the budget has a limit in dollars.
        """
        budget = self.config.budget
        if budget.usd_per_million_prompt is not None and budget.usd_per_million_reply is not None:
            return Price(budget.usd_per_million_prompt / 1e6, budget.usd_per_million_reply / 1e6)
        is_listed = self.config.api.base_url is None and not self._is_replay
        known = (load_litellm().model_cost.get(self.config.model) if is_listed else None) or {}
        prompt, reply = known.get("input_cost_per_token"), known.get("output_cost_per_token")
        if prompt is not None and reply is not None:
            return Price(float(prompt), float(reply))
        if budget.max_cost_usd is not None and not self._is_replay:
            raise ConfigError(
                f"paper.budget.max_cost_usd={budget.max_cost_usd:g}: what {self.config.model} costs is not known "
                "here; set budget.usd_per_million_prompt and usd_per_million_reply, or limit max_tokens alone"
            )
        return None

    def ask(
        self, messages: Messages, tools: Messages, ledger: BudgetLedger, record: Callable[..., None]
    ) -> ModelReply:
        """Return the model's reply; `record` gets every attempt before it is sent and after it failed.

        Raises:
            ConfigError: the server refuses the key, the model, or the address.
            AgentError: it refuses the request, fails on every attempt, or never answers in form (ModelUnusable).
            BudgetExceeded: an attempt would cross a limit.
        """
        request = {"model": self.config.model, "messages": messages, "tools": tools}
        if self.journal is not None and (known := self.journal.find(request)) is not None:
            return _recorded(known)
        if self._is_replay and self.journal is not None:
            reply = _recorded(self.journal.find_recorded(request))
            ledger.record_usage(ledger.reserve(messages, tools), reply.prompt_tokens, reply.reply_tokens)
        elif self._has_text_tools and tools:
            reply = self._ask_in_text(messages, tools, ledger, record)
        else:
            try:
                reply = self._attempt(messages, tools, ledger, record)
            except _ToolsRefused:
                self._has_text_tools = True
                reply = self._ask_in_text(messages, tools, ledger, record)
        if self.journal is not None:
            self.journal.add(request, asdict(reply))
        return reply

    def _ask_in_text(
        self, messages: Messages, tools: Messages, ledger: BudgetLedger, record: Callable[..., None]
    ) -> ModelReply:
        """Ask for calls as JSON, and again where the answer is none."""
        conversation = as_text(messages, tools)
        for _ in range(MOST_REASKED + 1):
            reply = self._attempt(conversation, [], ledger, record)
            try:
                text, calls = read_calls(reply.text, tools)
            except ValueError as error:
                asked = f"{error}; answer with one JSON object as described, and nothing else"
                conversation += [
                    {"role": "assistant", "content": reply.text},
                    {"role": "user", "content": asked},
                ]
            else:
                return _reply({"content": text, "tool_calls": calls}, *_counts(reply))
        raise ModelUnusable(
            f"{self.config.model}{at_server(self.config.api)}: {MOST_REASKED + 1} answers without a call in JSON; "
            "take a model that follows a schema"
        )

    def _attempt(
        self, messages: Messages, tools: Messages, ledger: BudgetLedger, record: Callable[..., None]
    ) -> ModelReply:
        config = self.config
        body: dict[str, Any] = {"messages": messages, "max_tokens": config.budget.max_reply_tokens}
        body |= {"tools": tools, "tool_choice": "auto"} if tools else {}
        body |= {} if config.temperature is None else {"temperature": config.temperature}
        attempt = 0
        while True:
            attempt += 1
            reserved = ledger.reserve(messages, tools)
            record("attempt", attempt=attempt, reserved_tokens=reserved.tokens)
            try:
                reply = _read(run_with_timeout(config.api.timeout_s, lambda: self._send(body)))
            except Exception as error:
                failure = read_failure(error, config)
                if failure.was_refused:
                    ledger.release(reserved)
                record("attempt_failed", attempt=attempt, error=failure.text, status=failure.status)
                self._refuse(failure, attempt, has_tools=bool(tools))
                wait = max(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5), failure.retry_after)
                self._sleep(min(wait, config.api.max_wait_s))
            else:
                ledger.record_usage(reserved, reply.prompt_tokens, reply.reply_tokens)
                return reply

    def _refuse(self, failure: Failure, attempt: int, *, has_tools: bool) -> None:
        """Raise what a failed attempt means, unless it may pass and there are attempts left."""
        api = self.config.api
        if failure.user_error is not None:
            raise ConfigError(failure.user_error)
        if has_tools and failure.status in (400, 422) and api.tools == "auto" and "tool" in failure.text:
            raise _ToolsRefused
        if not failure.may_pass or attempt > api.retries:
            tries = f" (attempt {attempt} of {api.retries + 1})" if failure.may_pass else ""
            raise AgentError(
                f"{self.config.model}{at_server(api)}: {failure.text}{tries}; the draft is kept, "
                f"resume with {self._way_on}"
            )


def _recorded(plain: dict[str, Any]) -> ModelReply:
    return ModelReply(**{**plain, "calls": tuple(ToolCall(**call) for call in plain["calls"])})


def _counts(reply: ModelReply) -> tuple[str, int | None, int | None]:
    return reply.finish, reply.prompt_tokens, reply.reply_tokens


def _read(answer: dict[str, Any]) -> ModelReply:
    """Return a response as a reply.

    Raises:
        AgentError: it holds no choice.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0].get("message"), dict):
        raise AgentError("the server's answer holds no choice")
    usage = answer.get("usage") or {}
    prompt, reply = usage.get("prompt_tokens") or 0, usage.get("completion_tokens", 0)
    is_counted = isinstance(prompt, int) and isinstance(reply, int) and prompt > 0 and reply >= 0
    counts = (prompt, reply) if is_counted else (None, None)
    return _reply(choices[0]["message"], str(choices[0].get("finish_reason") or ""), *counts)


def _reply(message: dict[str, Any], finish: str, prompt: int | None, reply: int | None) -> ModelReply:
    """Return a message as text that can be saved; each call has an id of its own."""
    calls: dict[str, ToolCall] = {}
    for index, call in enumerate(message.get("tool_calls") or []):
        identity = encodable(str(call.get("id") or f"call_{index}"))
        identity = f"{identity}_{index}" if identity in calls else identity
        function = call.get("function") or {}
        name, text = str(function.get("name") or ""), str(function.get("arguments") or "")
        calls[identity] = ToolCall(identity, encodable(name), encodable(text))
    text = encodable(str(message.get("content") or ""))
    return ModelReply(text, tuple(calls.values()), encodable(finish), prompt, reply)
