"""Work per request is bounded, quoted input is clipped, and options without effect are accepted."""

from __future__ import annotations

import random
import time

import pytest

from caramba.infer.row import StopMatcher
from caramba.serve.failure import LONGEST_MESSAGE, ApiError
from caramba.serve.guard import host_name, is_loopback
from caramba.serve.schema import MOST_VALUES, ChatRequest, CompletionRequest, parse_request

NO_OP = {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}}
TALK = [{"role": "developer", "name": "me", "content": "be brief"}, {"role": "user", "content": "a"}]


def test_parse_request_accepts_options_without_effect() -> None:
    assert parse_request(CompletionRequest, {"prompt": "a", **NO_OP}).model is None
    assert parse_request(ChatRequest, {"model": "m", "messages": TALK, "tools": [], **NO_OP}).messages[0].name == "me"


@pytest.mark.parametrize(
    ("key", "value"),
    [("frequency_penalty", 0.5), ("presence_penalty", -1), ("logit_bias", {"5": 1}), ("tools", [{}])],
)
def test_parse_request_refuses_unsupported_options_by_name(key: str, value: object) -> None:
    with pytest.raises(ApiError) as error:
        parse_request(ChatRequest, {"messages": TALK, key: value})
    assert error.value.status == 400
    assert key in str(error.value)


@pytest.mark.parametrize(
    "body",
    [
        {f"k{i}": 1 for i in range(60_000)},
        {"messages": [1] * 300_000},
        {"messages": [{}] * 300_000},
        {"messages": TALK, "stop": [1] * 300_000},
        {"prompt": [[]] * 300_000},
    ],
)
def test_parse_request_refuses_many_values_in_bounded_time(body: dict[str, object]) -> None:
    began = time.process_time()
    with pytest.raises(ApiError, match=f"more than {MOST_VALUES} values"):
        parse_request(ChatRequest, body)
    assert time.process_time() - began < 1.0  # 15 s and more before


def test_parse_request_takes_many_token_ids() -> None:
    ids = list(range(50_000))
    assert parse_request(CompletionRequest, {"prompt": ids}).prompt == tuple(ids)


def test_api_error_clips_what_it_quotes() -> None:
    error = ApiError(400, "x" * 900_000, param="k" * 900_000)
    assert len(str(error)) <= LONGEST_MESSAGE
    assert "more characters" in str(error)
    assert error.param is not None
    assert len(error.param) <= 200


@pytest.mark.parametrize(
    ("host", "is_here"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("[::1]:80", True),
        ("127.0.0.1:80@evil.com", False),
        ("localhost:80@evil.com", False),
        ("evil.com#127.0.0.1", False),
        ("[::1]evil.com", False),
        ("127.0.0.1:8000:9", False),
        ("", False),
    ],
)
def test_host_name_is_parsed_strictly(host: str, is_here: bool) -> None:
    assert is_loopback(host_name(host)) is is_here


@pytest.mark.parametrize("seed", range(20))
def test_stop_matcher_finds_the_first_occurrence(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=200))
    stop = "".join(rng.choices("ab", k=rng.randint(1, 9)))
    matcher = StopMatcher(stop)
    found = next((at for at, character in enumerate(text) if matcher.push(character)), -1)
    assert found == (text.find(stop) + len(stop) - 1 if stop in text else -1)


def test_stop_matcher_is_linear_in_the_text() -> None:
    matcher = StopMatcher("a" * 500_000 + "b")
    began = time.process_time()
    assert not any(matcher.push("a") for _ in range(200_000))
    assert time.process_time() - began < 2.0
