"""Tools as text, and replies from a record: what is asked again, what is not, and how a difference is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.paper_servers import Answer, chat_server, says

from caramba.config.paper import BudgetConfig, LoopBudgetConfig, PaperConfig
from caramba.errors import AgentError, ConfigError
from caramba.paper.budget import BudgetLedger, Spent
from caramba.paper.client import LanguageModel, ModelReply, ModelUnusable, as_text, read_limits
from caramba.paper.research.journal import CALLS, Journal, RecordedModel
from caramba.paper.research.spending import LoopBudget

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Rules."},
    {"role": "user", "content": "write"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "x", "parameters": {"type": "object"}}}]
CALL = json.dumps({"calls": [{"name": "look", "arguments": {"at": 1}}]})
Make = Callable[..., PaperConfig]


def ask(config: PaperConfig, journal: Journal | None = None, text: str = "write") -> ModelReply:
    model = LanguageModel(config, sleep=lambda seconds: None)
    if journal is not None:
        journal.file.parent.mkdir(exist_ok=True)
        budget = LoopBudget(journal.file.parent, LoopBudgetConfig())
        model = RecordedModel(journal, budget, config, sleep=lambda seconds: None)
    messages = [MESSAGES[0], {"role": "user", "content": text}]
    return model.ask(messages, TOOLS, BudgetLedger(BudgetConfig(), Spent(), None), lambda: None)


def test_calls_are_read_from_text(config: Make) -> None:
    with chat_server(says(f"Well:\n```json\n{CALL}\n```")) as server:
        reply = ask(config(server.url, api={"tools": "text"}))
    assert "tools" not in server.requests[0]
    assert '"name": "look"' in server.requests[0]["messages"][0]["content"]
    (call,) = reply.message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"at": 1})


def test_a_server_that_refuses_tools_is_asked_in_text(config: Make) -> None:
    refusal = Answer(b'{"error": {"message": "tools: at most 0 items"}}', 422)
    with chat_server(refusal, says('{"text": "done"}')) as server:
        assert ask(config(server.url)).message["content"] == "done"
    with chat_server(refusal) as server, pytest.raises(AgentError, match="at most 0 items"):
        ask(config(server.url, api={"tools": "native"}))


@pytest.mark.parametrize("bad", ["words", "{}", '{"calls": [{"tool": "rm"}]}', '{"calls": [{"name": "lo'])
def test_an_answer_out_of_form_is_asked_for_twice_more(bad: str, config: Make) -> None:
    with chat_server(says(bad), says(bad), says(CALL)) as server:
        assert ask(config(server.url, api={"tools": "text"})).message["tool_calls"]
        assert len(server.requests) == 3
    with chat_server(*[says(bad)] * 5) as server:
        with pytest.raises(ModelUnusable, match="3 answers without a call in JSON"):
            ask(config(server.url, api={"tools": "text"}))
        assert len(server.requests) == 3


def test_a_conversation_becomes_turns_of_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{"}}
    tool = {"role": "tool", "tool_call_id": "c", "content": "seen"}
    made = as_text([*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]}, tool, MESSAGES[1]], TOOLS)
    assert [item["role"] for item in made] == ["system", "user", "assistant", "user"]
    assert made[-1]["content"] == "Result of c: seen\nwrite"


def test_a_recorded_call_is_not_paid_again_and_is_replayed(config: Make, tmp_path: Path) -> None:
    file = tmp_path / CALLS
    with chat_server(says("first")) as server:
        plain = config(server.url)
        journal = Journal(file)
        journal.step = "iter1/draft"
        first = ask(plain, journal)
        with open(file, "a") as half:
            half.write('{"step": "it')  # what a kill leaves
        again = Journal(file)
        again.step = "iter1/draft"
        assert ask(plain, again) == first
        assert len(server.requests) == 1
    replayed = Journal(tmp_path / "new" / CALLS, replay=file)
    replayed.step = "iter1/draft"
    assert ask(plain, replayed) == first
    assert (tmp_path / "new" / CALLS).read_bytes() == file.read_bytes()
    with pytest.raises(AgentError, match=r'(?s)iter1/draft:.*-   "content": "write".*\+   "content": "rewrite"'):
        ask(plain, replayed, "rewrite")


def test_a_server_that_is_down_is_named_before_anything_is_sent(config: Make) -> None:
    with pytest.raises(ConfigError, match="no server answers there"):
        read_limits(config())
