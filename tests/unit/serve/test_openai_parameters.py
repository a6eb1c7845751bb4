"""Every parameter of the openai client: values without effect are accepted, unsupported ones are refused by name."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import pytest

from tests.needs import need
from tests.unit.serve.served import NAME, byte_model, service_of, serving

need("openai")

TABLES_FROM = "3.54.0"
"""The client's version that the tables were made from."""
TRANSPORT = {"extra_headers", "extra_query", "extra_body", "timeout"}
BASE: dict[str, dict[str, Any]] = {
    "text": {"model": NAME, "prompt": "a", "max_tokens": 2, "temperature": 0},
    "chat": {
        "model": NAME,
        "messages": [{"role": "user", "content": "a"}],
        "max_completion_tokens": 2,
        "temperature": 0,
    },
}
SHARED: dict[str, list[Any]] = {
    "frequency_penalty": [0, 0.0, None],
    "presence_penalty": [0, 0.0, None],
    "logit_bias": [{}, None],
    "n": [1, None],
    "seed": [0, 7, None],
    "stop": [None, [], "\x00never", ["\x00never"]],
    "stream": [False, None],
    "stream_options": [None, {}, {"include_usage": False}, {"include_obfuscation": False}],
    "top_p": [1, 1.0, None],
    "user": ["me", "", None],
}
NO_OP: dict[str, dict[str, list[Any]]] = {
    "text": {
        **SHARED,
        "best_of": [1, None],
        "echo": [False, None],
        "logprobs": [None],
        "suffix": ["", None],
    },
    "chat": {
        **SHARED,
        "audio": [None],
        "function_call": ["none", "auto", None],
        "functions": [[], None],
        "logprobs": [False, None],
        "metadata": [{}, {"run": "1"}, None],
        "modalities": [["text"], None],
        "moderation": [None],
        "parallel_tool_calls": [True, False, None],
        "prediction": [None],
        "prompt_cache_key": ["key", None],
        "prompt_cache_options": [None],
        "prompt_cache_retention": [None],
        "reasoning_effort": ["none", None],
        "response_format": [{"type": "text"}, None],
        "safety_identifier": ["me", None],
        "service_tier": ["auto", "default", None],
        "store": [False, None],
        "tool_choice": ["none", "auto", None],
        "tools": [[], None],
        "top_logprobs": [0, None],
        "verbosity": ["medium", None],
        "web_search_options": [None],
    },
}
BOTH: dict[str, list[Any]] = {
    "frequency_penalty": [0.5, -2, "x"],
    "presence_penalty": [1, -0.1],
    "logit_bias": [{"5": 1}],
    "n": [2, 0],
    "stop": [["a"] * 17, 5],
    "stream_options": [{"include_obfuscation": True}, {"other": 1}],
    "temperature": [-1, 1000],
    "top_p": [0, 1.5],
    "seed": [-1],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
UNSUPPORTED: dict[str, dict[str, list[Any]]] = {
    "text": {
        **BOTH,
        "best_of": [2],
        "echo": [True],
        "logprobs": [6, -1],
        "suffix": ["x"],
        "max_tokens": [0, 10**6],
    },
    "chat": {
        **BOTH,
        "audio": [{"voice": "a", "format": "wav"}],
        "function_call": [{"name": "f"}],
        "functions": [[{"name": "f"}]],
        "modalities": [["audio"], ["text", "audio"]],
        "moderation": [{"model": "m"}],
        "prediction": [{"type": "content", "content": "a"}],
        "prompt_cache_options": [{"a": 1}],
        "prompt_cache_retention": ["24h"],
        "reasoning_effort": ["high"],
        "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
        "service_tier": ["flex"],
        "store": [True],
        "tool_choice": ["required", {"type": "function", "function": {"name": "f"}}],
        "tools": [[TOOL]],
        "top_logprobs": [21, 3],
        "verbosity": ["high"],
        "web_search_options": [{}, {"search_context_size": "low"}],
        "max_completion_tokens": [0, 10**6],
    },
}
Create = dict[str, Any]


@pytest.fixture(scope="module")
def create() -> Iterator[Create]:
    import openai  # takes a second, in every process that collects

    with serving(service_of(byte_model())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        yield {"text": client.completions.create, "chat": client.chat.completions.create}


@pytest.fixture(scope="module")
def expected(create: Create) -> dict[str, str]:
    """The texts without any further parameter."""
    return {kind: text_of(create[kind](**BASE[kind])) for kind in NO_OP}


def text_of(answer: Any) -> str:
    choice = answer.choices[0]
    return choice.text if hasattr(choice, "text") else choice.message.content


@pytest.mark.parametrize("kind", NO_OP)
def test_tables_hold_every_parameter_of_the_client(create: Create, kind: str) -> None:
    names = set(inspect.signature(create[kind]).parameters) - TRANSPORT - set(BASE[kind])
    # A parameter that a newer client adds is not known to be without effect: it belongs into both tables.
    missing = sorted(names - set(NO_OP[kind]) - {"max_tokens"})
    assert not missing or version("openai") != TABLES_FROM, missing


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind in NO_OP for name, values in NO_OP[kind].items() for value in values],
)
def test_value_without_effect_is_accepted(
    create: Create, expected: dict[str, str], kind: str, name: str, value: Any
) -> None:
    # Values that the client's own types forbid go around them, as other clients send them.
    assert text_of(create[kind](**BASE[kind], extra_body={name: value})) == expected[kind]
    if value is not None and name in inspect.signature(create[kind]).parameters:
        assert text_of(create[kind](**BASE[kind], **{name: value})) == expected[kind]


@pytest.mark.parametrize("kind", NO_OP)
@pytest.mark.parametrize("seed", range(10))
def test_values_without_effect_are_accepted_together(
    create: Create, expected: dict[str, str], kind: str, seed: int
) -> None:
    rng = random.Random(seed)
    names = rng.sample(sorted(NO_OP[kind]), rng.randint(2, len(NO_OP[kind])))
    body = {name: rng.choice(NO_OP[kind][name]) for name in names}
    assert text_of(create[kind](**BASE[kind], extra_body=body)) == expected[kind]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind in UNSUPPORTED for name, values in UNSUPPORTED[kind].items() for value in values],
)
def test_unsupported_value_is_refused_by_name(create: Create, kind: str, name: str, value: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as error:
        create[kind](**BASE[kind], extra_body={name: value})
    assert error.value.param == name
    assert name in error.value.message


@pytest.mark.parametrize("key", ["refusal", "tool_calls", "function_call", "audio", "name"])
def test_null_in_a_message_is_accepted(create: Create, key: str) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", key: None},
        {"role": "user", "content": "c"},
    ]
    assert create["chat"](**BASE["chat"] | {"messages": turns}).usage.completion_tokens
