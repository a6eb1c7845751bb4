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
from caramba.paper.failure import Failure, at_server, read_failure
from caramba.paper.journal import Journal
from caramba.paper.text_tools import as_text, read_calls
from caramba.paper.transport import load_litellm, open_transport
from caramba.paper.untrusted import encodable
from caramba.runs.deadline import run_with_timeout

FIRST_WAIT_S = 1.0
MOST_REASKED = 2


class ModelUnusable(AgentError):  # noqa: N818 - names the event
    """The model does not answer in the form that it is asked for."""


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
        ConfigError: a library of the extra `paper` is not installed, or the named variable holds no key, or one that no
            header carries.
    """
    own = () if config.api.base_url is not None else ("litellm",)
    for library in (*own, "pylatexenc", "pybtex", "pypdf"):
        need_library(library, "paper", where)
    key = config.api.key_env
    if key is None:
        return
    shown, held = config.api.shown_key_env, os.environ.get(key, "").strip()
    if not held:
        name = shown if shown != "…" else "NAME"
        raise ConfigError(
            f"{where}.api.key_env={shown}: no such variable is set; export {name}=… and give its name, not the key"
        )
    if not fits_header(held):
        raise ConfigError(
            f"{where}.api.key_env={shown}: the variable holds blanks or characters that a header cannot carry; export "
            "the key as the server has it, in ASCII"
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
        """Return what a token costs: as configured, else as in litellm's own list, None if in neither."""
        budget = self.config.budget
        if budget.usd_per_million_prompt is not None and budget.usd_per_million_reply is not None:
            return Price(budget.usd_per_million_prompt / 1e6, budget.usd_per_million_reply / 1e6)
        is_listed = self.config.api.base_url is None and not self._is_replay
        known = load_litellm().model_cost.get(self.config.model) if is_listed else None
        known = known or {}
        prompt, reply = known.get("input_cost_per_token"), known.get("output_cost_per_token")
        if prompt is None or reply is None:
            if budget.max_cost_usd is not None and not self._is_replay:
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
            AgentError: it refuses the request, fails on every attempt, or never answers in form (ModelUnusable).
            BudgetExceeded: an attempt would cross a limit.
        """
        request = {"model": self.config.model, "messages": messages, "tools": tools}
        if self.journal is not None and (known := self.journal.find(request)) is not None:
            return _recorded(known)
        if self._is_replay and self.journal is not None:
            reply = _recorded(self.journal.find_recorded(request))
            reserved = ledger.reserve(messages, tools)
            ledger.record_usage(reserved, reply.prompt_tokens, reply.reply_tokens)
        elif self._has_text_tools and tools:
            reply = self._ask_in_text(messages, tools, ledger, record)
        else:
            try:
                reply = self._attempt(messages, tools, ledger, record)
            except _Refused:
                self._has_text_tools = True
                reply = self._ask_in_text(messages, tools, ledger, record)
        if self.journal is not None:
            self.journal.add(request, asdict(reply))
        return reply

    def _ask_in_text(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        ledger: BudgetLedger,
        record: Callable[..., None],
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
                return _reply({"message": {"content": text, "tool_calls": calls}}, reply)
        raise ModelUnusable(
            f"{self.config.model}{at_server(self.config.api)}: {MOST_REASKED + 1} answers without a call in JSON; "
            "take a model that follows a schema"
        )

    def _attempt(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        ledger: BudgetLedger,
        record: Callable[..., None],
    ) -> ModelReply:
        attempts = self.config.api.retries + 1
        body: dict[str, Any] = {"messages": messages, "max_tokens": self.config.budget.max_reply_tokens}
        body |= {"tools": tools, "tool_choice": "auto"} if tools else {}
        body |= {} if self.config.temperature is None else {"temperature": self.config.temperature}
        for attempt in range(1, attempts + 1):
            reserved = ledger.reserve(messages, tools)
            record("attempt", attempt=attempt, reserved_tokens=reserved.prompt_tokens + reserved.reply_tokens)
            try:
                answer = run_with_timeout(self.config.api.timeout_s, lambda: self._send(body))
                reply = _read(answer)
            except Exception as error:
                failure = read_failure(error, self.config)
                if failure.was_refused:
                    ledger.release(reserved)
                record("attempt_failed", attempt=attempt, error=failure.text, status=failure.status)
                self._refuse(failure, attempt, has_tools=bool(tools))
                self._sleep(self._wait(attempt, failure.retry_after))
            else:
                ledger.record_usage(reserved, reply.prompt_tokens, reply.reply_tokens)
                return reply
        raise AssertionError("unreachable")

    def _refuse(self, failure: Failure, attempt: int, *, has_tools: bool) -> None:
        """Raise what a failed attempt means, unless it may pass and there are attempts left."""
        attempts = self.config.api.retries + 1
        if failure.user_error is not None:
            raise ConfigError(failure.user_error)
        if (
            has_tools
            and failure.status in (400, 422)
            and self.config.api.tools == "auto"
            and "tool" in failure.text
        ):
            raise _Refused
        if not failure.may_pass or attempt == attempts:
            tries = f" (attempt {attempt} of {attempts})" if failure.may_pass else ""
            raise AgentError(
                f"{self.config.model}{at_server(self.config.api)}: {failure.text}{tries}; the draft is kept, "
                f"resume with {self._way_on}"
            )

    def _wait(self, attempt: int, asked: float | None) -> float:
        wait = FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
        return min(max(wait, asked or 0.0), self.config.api.max_wait_s)


class _Refused(Exception):  # noqa: N818 - names the event
    """The server takes no tools."""


def _recorded(plain: dict[str, Any]) -> ModelReply:
    return ModelReply(**{**plain, "calls": tuple(ToolCall(**call) for call in plain["calls"])})


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
    return _reply(choices[0], ModelReply("", (), str(choices[0].get("finish_reason") or ""), *counts))


def _reply(choice: dict[str, Any], counted: ModelReply) -> ModelReply:
    """Return a choice with the tokens of `counted`, as text that can be saved; each call has an id of its own."""
    calls: list[ToolCall] = []
    for index, call in enumerate(choice["message"].get("tool_calls") or []):
        identity = encodable(str(call.get("id") or f"call_{index}"))
        if any(identity == other.id for other in calls):
            identity = f"{identity}_{index}"
        function = call.get("function") or {}
        name, text = str(function.get("name") or ""), str(function.get("arguments") or "")
        calls.append(ToolCall(identity, encodable(name), encodable(text)))
    return ModelReply(
        encodable(str(choice["message"].get("content") or "")),
        tuple(calls),
        encodable(counted.finish),
        counted.prompt_tokens,
        counted.reply_tokens,
    )
