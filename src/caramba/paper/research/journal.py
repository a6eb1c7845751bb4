"""calls.jsonl: answered requests with their replies: no paid call is repeated, and a session can be replayed."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from operator import eq
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from caramba.config.paper import PaperConfig
from caramba.errors import AgentError, ConfigError
from caramba.paper.budget import BudgetLedger
from caramba.paper.client import LanguageModel, Messages, ModelReply
from caramba.paper.research.spending import LoopBudget, SharedLedger
from caramba.runs.files import append_line, whole_lines

CALLS = "calls.jsonl"


class Journal:
    """The calls of one folder. `step` names what they are for; within a step one request has one reply."""

    def __init__(self, file: Path, replay: Path | None = None) -> None:
        """Read `file`, to which replies are added; with `replay`, replies come from that file alone.

        Raises:
            ConfigError: one of them cannot be read.
        """
        self.file, self.replay, self.step = file, replay, ""
        self._known = _read(file)
        self._recorded = None if replay is None else _read(replay)
        if replay is not None and not self._recorded:
            raise ConfigError(f"{replay}: holds no recorded call; name the {CALLS} of a loop")

    def find(self, request: dict[str, Any]) -> dict[str, Any] | None:
        """Return the reply to a request of this step that was answered before, None where there is none."""
        line = self._known.get((self.step, digest_of(request)))
        return None if line is None else line["reply"]

    def find_recorded(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply of the file that is replayed.

        Raises:
            AgentError: that file has no such request; the message has the difference from the nearest one.
        """
        recorded = self._recorded or {}
        line = recorded.get((self.step, digest_of(request)))
        if line is not None:
            return line["reply"]
        text = _lines(request)
        others = [_lines(item["request"]) for (step, _), item in recorded.items() if step == self.step]
        nearest = max(others, key=lambda other: sum(map(eq, text, other)), default=[])
        diff = list(difflib.unified_diff(nearest, text, "recorded", "asked", lineterm="", n=1))[:12]
        shown = "\n".join(part[:200] for part in diff)
        raise AgentError(f"{self.replay}: no recorded reply to this request of {self.step}:\n{shown}")

    def add(self, request: dict[str, Any], reply: dict[str, Any]) -> None:
        """Write a reply to disk before anything follows from it."""
        digest = digest_of(request)
        line = {"step": self.step, "sha256": digest, "request": request, "reply": reply}
        append_line(self.file, json.dumps(line, ensure_ascii=False, sort_keys=True))
        self._known[self.step, digest] = line


def digest_of(request: dict[str, Any]) -> str:
    """Return the hash of a request in canonical form."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _read(file: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the calls of a file; half a last line is what a kill left, and is cut off."""
    try:
        lines = [json.loads(text) for text in whole_lines(file)]
        return {(line["step"], digest_of(line["request"])): line for line in lines}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not a record of calls ({type(error).__name__}); restore it from a copy") from None


def _lines(request: dict[str, Any]) -> list[str]:
    return json.dumps(request, sort_keys=True, indent=1, ensure_ascii=False).splitlines()


class RecordedModel(LanguageModel):
    """A language model of a loop, whose budget it shares. It is not asked for what the journal holds.

    In a replay only the recorded file answers.
    """

    def __init__(self, journal: Journal, budget: LoopBudget, config: PaperConfig, **named: Any) -> None:
        """Check that the model can be asked, unless it is replayed; `named` as for `LanguageModel`."""
        self.journal, self.budget, self.config = journal, budget, config
        if journal.replay is None:
            super().__init__(config, **named)

    def ask(self, messages: Messages, tools: Messages, ledger: BudgetLedger, save: Callable[[], None]) -> ModelReply:
        """Return the reply of the journal, of the replayed file, or of the model, as `LanguageModel.ask` does."""
        request = {"model": self.config.model, "messages": messages, "tools": tools}
        read = TypeAdapter(ModelReply).validate_python
        if (known := self.journal.find(request)) is not None:
            return read(known)
        ledger = SharedLedger(ledger, self.budget)
        if self.journal.replay is not None:
            reply = read(self.journal.find_recorded(request))
            ledger.record_usage(ledger.reserve(messages, tools), reply.prompt_tokens, reply.reply_tokens)
        else:
            reply = super().ask(messages, tools, ledger, save)
        self.journal.add(request, asdict(reply))
        return reply
