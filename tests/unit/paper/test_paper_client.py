"""The language model through litellm and a server on loopback: what is sent, and every way in which it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.needs import need
from tests.paper_servers import Answer, calls, chat_server, dripping_server, fails, says

from caramba.config.paper import BudgetConfig, CitationsConfig, PaperConfig
from caramba.errors import AgentError, BudgetExceeded, ConfigError
from caramba.paper import client
from caramba.paper.budget import BudgetLedger, Price, Spent
from caramba.paper.client import LanguageModel
from caramba.paper.literature import Literature, SearchFailed

need("litellm")

MESSAGES = [{"role": "user", "content": "write"}]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "x", "parameters": {"type": "object"}}}]
Make = Callable[..., PaperConfig]


def ledger(limits: BudgetConfig | None = None, price: Price | None = None) -> BudgetLedger:
    return BudgetLedger(limits or BudgetConfig(), Spent(), price)


def asked(config: PaperConfig, book: BudgetLedger | None = None) -> tuple[Any, list[int], list[float]]:
    """Ask once and return the reply, the tokens that were reserved whenever that was saved, and the pauses."""
    waits: list[float] = []
    saved: list[int] = []
    model, book = LanguageModel(config, sleep=waits.append), book or ledger()
    reply = model.ask(MESSAGES, TOOLS, book, lambda: saved.append(book.spent.tokens))
    return reply, saved, waits


def test_a_request_is_sent_as_configured(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-mine ")
    with chat_server(calls(("look", {"at": 1}))) as server:
        plain = config(server.url, temperature=0.5, api={"key_env": "MY_KEY"}, budget={"max_reply_tokens": 99})
        reply, _, _ = asked(plain)
        (request,) = server.requests
    assert server.keys == ["Bearer sk-mine"]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("scripted", 0.5, 99)
    assert request["messages"] == MESSAGES
    assert request["tools"] == TOOLS
    (call,) = reply.message["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert (reply.prompt_tokens, reply.reply_tokens, reply.message["content"]) == (100, 20, "")
    with chat_server(says("hello")) as server:
        asked(config(server.url, model="openai/other"))
    assert server.requests[0]["model"] == "other"
    assert "temperature" not in server.requests[0]


def test_a_key_of_another_provider_is_not_sent_to_a_server(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    with chat_server(says("hello")) as server:
        asked(config(server.url))
    assert server.keys == ["Bearer none"]
    with pytest.raises(
        ConfigError, match=r"paper\.api\.base_url=http://llm\.example/v1: the name of .* set api\.key_env"
    ):
        LanguageModel(config("http://llm.example/v1"))


PASSING = [
    fails(500),
    fails(503),
    fails(429, {"Retry-After": "7"}),
    Answer(b"<html>gateway</html>"),
    Answer(b'{"choices": []}'),
    Answer(b"{", 200),
]


@pytest.mark.parametrize("failure", PASSING, ids=lambda answer: f"{answer.status}-{answer.body[:8]}")
def test_what_may_pass_is_tried_again(failure: Answer, config: Make) -> None:
    with chat_server(failure, failure, says("at last")) as server:
        reply, saved, waits = asked(config(server.url))
    assert reply.message["content"] == "at last"
    assert len(server.requests) == 3  # and no attempt of litellm's own
    assert len(saved) == 3  # what is reserved is on disk before it is sent
    assert min(saved) > 8192
    assert len(waits) == 2
    assert all(wait >= (7 if failure.status == 429 else 0.5) for wait in waits)


@pytest.mark.parametrize(
    "failure",
    [*PASSING, Answer(b"{}", delay_s=1.0)],
    ids=lambda answer: f"{answer.status}-{answer.body[:8]}-{answer.delay_s}",
)
def test_attempts_are_bounded(failure: Answer, config: Make) -> None:
    with chat_server(*[failure] * 5) as server:
        plain = config(server.url, api={"retries": 1, "max_wait_s": 0.1, "timeout_s": 0.4 if failure.delay_s else 20.0})
        with pytest.raises(AgentError, match=r"scripted at http://127.*attempt 2 of 2"):
            asked(plain)
    assert len(server.requests) == 2


def test_a_pause_is_no_longer_than_allowed(config: Make) -> None:
    with chat_server(fails(429, {"Retry-After": "9999"}), says("x")) as server:
        _, _, waits = asked(config(server.url, api={"max_wait_s": 2.0}))
    assert waits == [2.0]


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (401, ConfigError, r"paper\.model=scripted at .*: the server refused the key \(401\); check MY_KEY"),
        (403, ConfigError, r"the server refused the key \(403\)"),
        (404, ConfigError, r"no such model or address \(404\); check model and api\.base_url"),
        (400, AgentError, "scripted 400"),
        (422, AgentError, "scripted 422"),
    ],
)
def test_what_cannot_pass_is_not_tried_again(
    status: int, kind: type[Exception], message: str, config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-mine")
    book = ledger()
    with chat_server(fails(status), says("never")) as server:
        with pytest.raises(kind, match=message) as raised:
            asked(config(server.url, api={"key_env": "MY_KEY"}), book)
        assert len(server.requests) == 1
    assert "sk-mine" not in str(raised.value)
    assert book.spent.tokens == 0  # a refused request costs nothing


def test_a_key_that_a_server_repeats_is_shown_nowhere(
    config: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-mine-1234")
    body = json.dumps({"error": {"message": "wrong key sk-mine-1234", "type": "x", "code": "invalid_api_key"}})
    expected = pytest.raises(ConfigError, match=r"wrong key \$MY_KEY")
    with chat_server(Answer(body.encode(), 401)) as server, expected as raised:
        asked(config(server.url, api={"key_env": "MY_KEY"}))
    assert "sk-mine" not in f"{raised.value}{capsys.readouterr()}"


def test_a_server_that_is_not_there(config: Make) -> None:
    with pytest.raises(AgentError, match=r"cannot be reached"):
        asked(config("http://127.0.0.1:9/v1", api={"retries": 0}))


def test_usage_is_booked_and_unknown_usage_counts_in_full(config: Make) -> None:
    book = ledger(price=Price(1e-6, 2e-6))
    with chat_server(says("x"), says("y", usage=False)) as server:
        asked(config(server.url), book)
        assert (book.spent.prompt_tokens, book.spent.reply_tokens) == (100, 20)
        assert book.spent.cost_usd == pytest.approx(140e-6)
        asked(config(server.url), book)
    assert book.spent.reply_tokens == 20 + 8192
    assert book.spent.prompt_tokens > 100


def test_usage_that_cannot_be_counts_in_full(config: Make) -> None:
    body = json.loads(says("x").body)
    body["usage"] = {"prompt_tokens": 1, "completion_tokens": -100_000, "total_tokens": 0}
    book = ledger()
    with chat_server(Answer(json.dumps(body).encode())) as server:
        asked(config(server.url), book)
    assert book.spent.reply_tokens == 8192


def test_a_reply_that_drips_runs_into_the_limit(config: Make) -> None:
    with dripping_server("body") as url:
        began = time.monotonic()
        with pytest.raises(AgentError, match=r"no answer within 0\.5 s"):
            asked(config(f"{url}/v1", api={"timeout_s": 0.5, "retries": 0}))
        assert time.monotonic() - began < 60  # it never ends


def test_a_reply_is_made_one_that_can_be_saved(config: Make) -> None:
    twice = calls(("look \ud83d", '{"a": "\ud83d"}'), ("look", {}))
    body = json.loads(twice.body)
    for call in body["choices"][0]["message"]["tool_calls"]:
        call["id"] = "same"
    body["choices"][0]["message"]["content"] = "half \ud83d"
    with chat_server(Answer(json.dumps(body).encode())) as server:
        reply, _, _ = asked(config(server.url))
    assert reply.message["content"] == "half ?"
    made = [(call["id"], call["function"]["name"]) for call in reply.message["tool_calls"]]
    assert made == [("same", "look ?"), ("same_1", "look")]
    json.dumps(reply.message, ensure_ascii=False).encode()


def test_an_attempt_that_would_cross_a_limit_is_not_sent(config: Make) -> None:
    with chat_server(fails(500), says("x")) as server:
        limits = BudgetConfig(max_tokens=9000)
        with pytest.raises(BudgetExceeded, match=r"max_tokens=9,000 are spent; raise it"):
            asked(config(server.url), ledger(limits))  # a 500 may have been worked on: it counts
        assert len(server.requests) == 1


def test_prices(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    known = LanguageModel(PaperConfig(model="gpt-4o")).price()
    assert known is not None
    assert 0 < known.prompt < known.reply < 1e-3
    assert LanguageModel(config()).price() is None
    given = config(budget={"usd_per_million_prompt": 1.0, "usd_per_million_reply": 4.0, "max_cost_usd": 0.5})
    assert LanguageModel(given).price() == Price(1e-6, 4e-6)
    with pytest.raises(ConfigError, match=r"paper\.budget\.max_cost_usd=0\.5: what scripted costs is not known"):
        LanguageModel(config(budget={"max_cost_usd": 0.5})).price()


def test_models_and_keys_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    for value in (None, "", " "):
        if value is not None:
            monkeypatch.setenv("OPENAI_API_KEY", value)
        with pytest.raises(ConfigError, match=r"paper\.model=gpt-4o: the environment lacks OPENAI_API_KEY"):
            LanguageModel(PaperConfig(model="gpt-4o"))
        assert os.environ.get("OPENAI_API_KEY") == value
    with pytest.raises(ConfigError, match=r"paper\.model=nonsense: litellm knows no provider"):
        LanguageModel(PaperConfig(model="nonsense"))
    with pytest.raises(ConfigError, match=r"paper\.api\.key_env=NO_SUCH: no such variable is set; export NO_SUCH"):
        LanguageModel(PaperConfig.model_validate({"api": {"key_env": "NO_SUCH"}}))


@pytest.mark.parametrize("key", ["schlüssel", "two words", "sk-\u2013a", "line\nbreak", "\udcff"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("MY_KEY", key)
    with pytest.raises(ConfigError, match=r"paper\.api\.key_env=MY_KEY: the variable holds blanks") as refused:
        LanguageModel(PaperConfig.model_validate({"api": {"key_env": "MY_KEY"}}))
    assert key not in str(refused.value)


def test_an_absent_litellm_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"paper: litellm is not installed; pip install 'caramba\[paper\]'"):
        LanguageModel(PaperConfig(model="gpt-4o"))


OFFLINE = """
import os, socket, sys
def refused(*arguments):
    raise AssertionError(f"connects to {arguments}")
socket.socket.connect = socket.create_connection = refused
os.environ.pop("LITELLM_LOCAL_MODEL_COST_MAP", None)
import caramba.paper
assert "litellm" not in sys.modules and "torch" not in sys.modules
from caramba.config.paper import PaperConfig
from caramba.paper.client import LanguageModel
LanguageModel(PaperConfig.model_validate({"model": "m", "api": {"base_url": "http://127.0.0.1:9/v1"}}))
assert "litellm" not in sys.modules
os.environ["OPENAI_API_KEY"] = "sk-x"
LanguageModel(PaperConfig(model="gpt-4o"))
assert "litellm" in sys.modules and "torch" not in sys.modules
print("secret" if "FROM_DOTENV" in os.environ else "quiet", sys.modules["litellm"].telemetry)
"""


def test_loading_litellm_connects_to_nothing_and_reads_no_dotenv(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("FROM_DOTENV=1\n")
    done = subprocess.run([sys.executable, "-c", OFFLINE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["quiet", "False"], done.stderr


def test_keys_of_the_environment_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key-of-no-known-form")
    text, *_ = client._read_failure(OSError("wrong key: a-key-of-no-known-form"), PaperConfig())
    assert "a-key" not in text
    assert "$OPENAI_API_KEY" in text
    monkeypatch.setenv("SEMANTIC_SCHOLAR_API_KEY", "two\nlines")
    with pytest.raises(SearchFailed, match="characters that a header cannot carry") as failed:
        Literature(CitationsConfig()).search("semantic_scholar", "attention", 1)
    assert "two" not in str(failed.value)
