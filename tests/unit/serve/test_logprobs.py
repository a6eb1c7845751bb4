"""Alternatives to each token are the model's own log softmax, before penalty, temperature and filters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
import torch

from caramba.data import ByteTokenizer, Tokenizer
from caramba.infer import generate
from caramba.infer.dialogue import Dialogue
from caramba.infer.engine import Engine
from caramba.model import Model
from caramba.serve.running import Alternative, SampledToken
from caramba.serve.shapes import _by_text
from tests.needs import need
from tests.unit.serve.served import NAME, byte_model, service_of, serving, subword_model

need("openai")

PROMPT = "the quick"
N_NEW = 6
SETTINGS = (
    {"temperature": 0},
    {"temperature": 1.7, "seed": 3},
    {"temperature": 0.6, "top_p": 0.8, "seed": 5},
)
MORE = ({}, {"repetition_penalty": 1.5, "top_k": 7, "min_p": 0.01})
Served = tuple[Any, Model, Tokenizer, str]


@pytest.fixture(scope="module", params=["bytes", "subwords"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    import openai  # takes a second, in every process that collects

    model, tokenizer = subword_model() if request.param == "subwords" else (byte_model(), ByteTokenizer())
    with serving(service_of(model, tokenizer=tokenizer)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), model, tokenizer, url


def expected(model: Model, prompt: Sequence[int], new: Sequence[int]) -> torch.Tensor:
    """Return log softmax(logits) before each new token. Shape: [T, V]."""
    tokens = torch.tensor([[*prompt, *new]])
    with torch.inference_mode():
        logits = model.logits(model.hidden(tokens))[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1)


def close(found: Sequence[float], wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_completion_logprobs_are_the_models_own(
    served: Served, n: int, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    client, model, tokenizer, _ = served
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": N_NEW, "logprobs": n, **settings}
    whole = client.completions.create(**asked, extra_body=more).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.tokens is not None
    assert whole.logprobs.token_logprobs is not None
    new = drawn_ids(model, tokenizer, {**settings, **more})
    assert [tokenizer.decode([token]) for token in new] == whole.logprobs.tokens
    table = expected(model, tokenizer.encode(PROMPT), new)
    close(whole.logprobs.token_logprobs, table.gather(1, torch.tensor(new)[:, None])[:, 0])
    if n == 0:
        assert whole.logprobs.top_logprobs is None
    else:
        assert whole.logprobs.top_logprobs is not None
        for row, own, token, text in zip(whole.logprobs.top_logprobs, table, new, whole.logprobs.tokens, strict=True):
            best = own.topk(n)
            is_among = token in best.indices.tolist()
            assert len(row) == n + (not is_among)
            close(list(row.values())[:n], best.values)
            close([row[text]], own[token][None])
    parts = list(client.completions.create(**asked, extra_body=more, stream=True))
    held = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs is not None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [item for part in held for item in getattr(part, name) or []]
        assert joined == (getattr(whole.logprobs, name) or []), name


def drawn_ids(model: Model, tokenizer: Tokenizer, settings: dict[str, Any]) -> list[int]:
    """Return the tokens that the same settings give without a server."""
    return list(generate(model, [PROMPT], tokenizer, max_new_tokens=N_NEW, **settings)[0].tokens)


@pytest.mark.parametrize("n", [0, 1, 7, 20])
def test_chat_logprobs_are_the_models_own(served: Served, n: int) -> None:
    client, model, tokenizer, _ = served
    turns = [{"role": "user", "content": "Hi"}]
    asked: dict[str, Any] = {
        "model": NAME, "messages": turns, "max_completion_tokens": 12, "logprobs": True, "top_logprobs": n, "seed": 2,
    }  # fmt: skip
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    prompt = Dialogue(tokenizer).encode(turns)
    (row,) = generate(model, [prompt], tokenizer, max_new_tokens=12, stop=("\nUser:",), temperature=1.0, seed=2)
    table = expected(model, prompt, row.tokens)
    for item, own, token in zip(choice.logprobs.content, table, row.tokens, strict=True):
        best = own.topk(n)
        assert item.token == tokenizer.decode([token])
        close([item.logprob], own[token][None])
        close([other.logprob for other in item.top_logprobs], best.values)
        assert [other.token for other in item.top_logprobs] == [tokenizer.decode([int(i)]) for i in best.indices]
        for other in item.top_logprobs:
            assert other.bytes == (None if "\ufffd" in other.token else list(other.token.encode()))
    parts = list(client.chat.completions.create(**asked, stream=True))
    held = [part.choices[0].logprobs for part in parts if part.choices[0].logprobs is not None]
    assert [item for part in held for item in part.content or []] == choice.logprobs.content


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a", "logprobs": 6}, "logprobs"),
        ("completions", {"prompt": "a", "logprobs": -1}, "logprobs"),
        ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat/completions", {"logprobs": False, "top_logprobs": 1}, "top_logprobs"),
        ("chat/completions", {"top_logprobs": 1}, "top_logprobs"),
    ],
)
def test_logprobs_out_of_range_are_refused_by_name(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    if path != "completions":
        body = {"messages": [{"role": "user", "content": "a"}], **body}
    answer = httpx.post(f"{served[3]}/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert param in answer.json()["error"]["message"]


def test_engine_gives_alternatives_to_the_requests_that_ask_alone() -> None:
    model, alone = byte_model(), byte_model()
    with Engine(model, n_slots=3, max_len=64) as engine:
        counts = (0, 3, 1000)
        tickets = [engine.submit([65, n % 7], max_new_tokens=6, seed=1, n_alternatives=n) for n in counts]
        for ticket, n in zip(tickets, counts, strict=True):
            events = [event for event in ticket if event.token is not None]
            assert [len(event.alternatives) for event in events] == [min(n, 257)] * len(events)
            table = expected(alone, [65, n % 7], ticket.tokens)
            for event, own in zip(events, table, strict=True):
                best = own.topk(min(n, 257))
                close([logprob for _, logprob in event.alternatives], best.values)


def test_tokens_of_one_text_have_keys_of_their_own() -> None:
    alternatives = (
        Alternative(200, "\ufffd", -0.5),
        Alternative(201, "\ufffd", -1.0),
        Alternative(5, "a", -2.0),
    )
    sampled = SampledToken("\ufffd", -1.0, 0, alternatives, 201)
    assert _by_text(sampled) == {"token_id:200": -0.5, "\ufffd": -1.0, "a": -2.0}
    sampled = SampledToken("\ufffd", -4.0, 0, alternatives, 202)
    assert _by_text(sampled) == {"token_id:200": -0.5, "token_id:201": -1.0, "a": -2.0, "\ufffd": -4.0}
