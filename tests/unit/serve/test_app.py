"""The interface over a real socket: its answers are those of `generate`, and every refusal says what to do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("starlette", reason="the extra `serve`")

import httpx

from caramba.data import ByteTokenizer
from caramba.infer import generate
from caramba.infer.dialogue import Dialogue
from caramba.model import Model
from caramba.serve import schema
from caramba.serve.app import build_app
from caramba.serve.service import Service
from tests.unit.serve.served import CONTEXT, NAME, byte_model, events, eventually, service_of, serving

MOST_TOKENS = CONTEXT - 16
LONG = {"model": NAME, "prompt": "c", "max_tokens": MOST_TOKENS, "temperature": 0}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}


@pytest.fixture(scope="module")
def model() -> Model:
    return byte_model()


@pytest.fixture(scope="module")
def service(model: Model) -> Service:
    return service_of(model)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[httpx.Client]:
    with serving(service) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


def test_a_completion_is_what_generate_gives_whole_and_streamed(client: httpx.Client, model: Model) -> None:
    filters = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.2}
    ends = ("length", "eos", "stop")
    for end, more in zip(ends, ({}, {"seed": 1}, {"stop": ["\u0002", "e"]} | filters), strict=True):
        settings = SAMPLED | more
        (row,) = generate(model, ["caf\u00e9"], ByteTokenizer(), max_new_tokens=24, **settings)
        assert row.finish == end
        body = {"model": NAME, "prompt": "caf\u00e9", "max_tokens": 24.0, "logprobs": 0, **settings}
        found = client.post("/v1/completions", json=body).json()
        (choice,) = found["choices"]
        assert (choice["text"], choice["logprobs"]["token_logprobs"]) == (
            row.text,
            pytest.approx(row.logprobs),
        )
        assert choice["finish_reason"] == {"eos": "stop"}.get(row.finish, row.finish)
        assert found["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": len(row.tokens),
            "total_tokens": 5 + len(row.tokens),
        }
        streamed = client.post(
            "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *chunks, last = events(streamed)
        assert (last["choices"], last["usage"]) == ([], found["usage"])
        choices = [chunk["choices"][0] for chunk in chunks]
        assert "".join(one["text"] for one in choices) == row.text
        assert [p for one in choices for p in one["logprobs"]["token_logprobs"]] == pytest.approx(row.logprobs)
        assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == choice["finish_reason"]
        assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_chat_is_answered_in_the_plain_format(client: httpx.Client, model: Model) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = Dialogue(ByteTokenizer()).encode(turns)
    (row,) = generate(model, [ids], ByteTokenizer(), max_new_tokens=20, stop=("\nUser:",), **SAMPLED)
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    body = {
        "model": NAME,
        "messages": [turns[0], {"role": "user", "content": parts}],
        "logprobs": True,
        **SAMPLED,
    }
    found = client.post("/v1/chat/completions", json=body | {"max_completion_tokens": 20}).json()
    (choice,) = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": row.text.lstrip()}
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == pytest.approx(row.logprobs)
    first, *chunks = events(client.post("/v1/chat/completions", json=body | {"max_tokens": 20, "stream": True}))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["choices"][0]["delta"].get("content", "") for one in chunks) == row.text.lstrip()


def test_without_a_seed_answers_differ(client: httpx.Client) -> None:
    body = {"model": NAME, "prompt": "a", "max_tokens": 8, "temperature": 3.0}
    texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "text"),
    [
        ("completions", b"{", 400, None, "the body is no JSON"),
        ("completions", b"[" * 4000, 400, None, "the body is no JSON"),
        ("completions", b'{"temperature": NaN}', 400, None, "the body is no JSON"),
        ("completions", b'"\\ud800"', 400, None, "the body is no JSON"),
        ("completions", b"[1]", 400, None, "got a list, expected an object"),
        ("completions", {"prompt": "a", "temprature": 1}, 400, "temprature", "did you mean 'temperature'"),
        (
            "completions",
            {"prompt": "a", "max_tokens": "5"},
            400,
            "max_tokens",
            "got '5', expected a valid integer",
        ),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "greater than 0"),
        (
            "completions",
            {"prompt": "a", "max_tokens": 1009},
            400,
            "max_tokens",
            "this server gives at most 1008",
        ),
        (
            "completions",
            {"prompt": "a" * 1020},
            400,
            "max_tokens",
            "1020 tokens of prompt and 16 new ones exceed",
        ),
        ("completions", {"prompt": ""}, 400, "prompt", "expected a text, a list of token ids"),
        ("completions", {"prompt": []}, 400, "prompt", "none is empty"),
        ("completions", {"prompt": [1, 257]}, 400, "prompt", "token 257, the model's vocabulary is 0 to 256"),
        ("completions", {"prompt": ["a", "b"]}, 400, "prompt", "a request has one prompt"),
        (
            "completions",
            {"prompt": "a", "logprobs": False},
            400,
            "logprobs",
            "got False, expected a valid integer",
        ),
        (
            "completions",
            {"prompt": "a", "max_tokens": 1.5},
            400,
            "max_tokens",
            "got 1.5, expected a valid integer",
        ),
        ("completions", {"prompt": "a", "n": 2}, 400, "n", "got 2, expected less than or equal to 1"),
        (
            "completions",
            {"prompt": "a", "logprobs": 6},
            400,
            "logprobs",
            "got 6, expected less than or equal to 5",
        ),
        ("completions", {"prompt": "a", "model": "gpt"}, 404, "model", "no model 'gpt'; served: tiny/bytes"),
        ("completions", {"prompt": "a" * 5000}, 413, None, "larger than 4096 bytes"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1 item"),
        (
            "chat/completions",
            {"messages": [{"role": "tool", "content": ""}]},
            400,
            "messages",
            "messages[0].role",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "max_completion_tokens": 1},
            400,
            "max_tokens",
            "are one key; give one",
        ),
    ],
)
def test_what_cannot_be_taken_is_refused(
    client: httpx.Client, path: str, body: Any, status: int, param: str | None, text: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps({"model": NAME} | body)
    response = client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    error = schema.FailureBody.model_validate_json(response.content, strict=True).error
    assert (response.status_code, error.param) == (status, param)
    assert text in error.message


def test_paths_methods_types_and_hosts(client: httpx.Client) -> None:
    for response, status, text in (
        (client.get("/v1/nothing"), 404, "/v1/nothing does not exist"),
        (client.get("/v1/completions"), 405, "takes POST, got GET"),
        (client.delete("/health"), 405, "got DELETE"),
        (client.post("/v1/completions", data={"a": "b"}), 415, "expected application/json"),
        (client.get("/v1/models/gpt"), 404, "no model 'gpt'"),
        (client.get("/health", headers={"host": "evil.example"}), 421, "not this machine's loopback"),
    ):
        assert (response.status_code, text in response.json()["error"]["message"]) == (status, True)
    assert client.get("/v1/models").json()["data"][0]["id"] == NAME
    assert client.get(f"/v1/models/{NAME}").json()["max_model_len"] == CONTEXT
    assert client.get("/health").json()["status"] == "ok"


def test_a_client_that_leaves_frees_its_slot_and_all_is_counted(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = service.engine.batch.decode
    # Slow enough that the answer is not whole before the client leaves, however busy the machine is.
    monkeypatch.setattr(service.engine.batch, "decode", lambda: (time.sleep(0.005), decode())[1])
    body = LONG | {"stream": True, "logprobs": 0}
    with client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
        assert service.engine.stats().active == 1
    assert eventually(lambda: service.engine.stats().active == 0)
    n_cancelled = service.engine.stats().cancelled
    assert n_cancelled > 0

    lines = client.get("/metrics").text.splitlines()
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}
    assert found['caramba_finished_total{reason="cancelled"}'] == n_cancelled
    assert found["caramba_slots"] == 4
    assert found["caramba_open_connections"] >= 1
    assert found["caramba_refused_connections_total"] == 0
    assert found["caramba_cache_bytes"] == service.engine.stats().cache_bytes > 0
    n_tokens, n_first = (
        found["caramba_generated_tokens_total"],
        found["caramba_time_to_first_token_seconds_count"],
    )
    assert n_tokens - n_first == found["caramba_inter_token_latency_seconds_count"] > 0
    assert found['caramba_requests_total{path="/v1/completions",status="200"}'] > 0


HEAD, PART = "http.response.start", "http.response.body"


@pytest.mark.parametrize(
    ("more", "unread", "sent_in_all"),
    [
        ({"stream": True}, PART, [HEAD, PART, PART]),  # the first words, and the last ones
        ({"max_tokens": 2}, PART, [HEAD, PART]),
        ({"stream": True}, HEAD, [HEAD]),  # the engine is late, and its client reads nothing of the failure
    ],
)
def test_a_client_that_does_not_read_is_cut_off_and_holds_no_slot(
    model: Model, more: dict[str, Any], unread: str, sent_in_all: list[str]
) -> None:
    # One thread does it all, and time is passed by hand: nothing hangs on how fast this machine is.
    service = service_of(model, timeout_s=10)
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    body = json.dumps(LONG | more).encode()
    sent: list[str] = []
    passed = [0.0]

    def loop_of_its_own_time() -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.time = lambda: time.monotonic() + passed[0]  # type: ignore[method-assign]
        return loop

    async def ask() -> None:
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return given.pop() if given else await asyncio.Event().wait()  # type: ignore[return-value]

        async def send(message: Any) -> None:
            sent.append(message["type"])
            if message["type"] == unread:
                passed[0] += service.limits.timeout_s
                await asyncio.Event().wait()  # the socket's buffer is full for good

        async def step() -> None:
            while unread not in sent:
                if unread == PART:
                    service.engine.step()
                elif service.engine.stats().queued and not passed[0]:
                    passed[0] = service.limits.timeout_s
                await asyncio.sleep(0)

        answer = build_app(service)(scope | {"headers": headers}, receive, send)
        await asyncio.wait_for(asyncio.gather(answer, step()), 3 * service.limits.timeout_s)

    with asyncio.Runner(loop_factory=loop_of_its_own_time) as runner:
        runner.run(ask())
        assert not service.engine.step()
    stats = service.engine.stats()
    assert (stats.active, stats.queued, stats.cancelled + stats.finished) == (0, 0, 1)
    ticket = service.engine.submit([1, 2], max_new_tokens=2, temperature=0.0, seed=0)
    while service.engine.step():
        pass
    assert (ticket.finish_reason, len(ticket.tokens)) == ("length", 2)
    assert sent == sent_in_all


def test_a_failing_model_is_told_and_the_next_request_is_answered(
    client: httpx.Client, service: Service, model: Model
) -> None:
    body = {"model": NAME, "prompt": "ab", "max_tokens": 4, "temperature": 0}
    good = client.post("/v1/completions", json=body).json()["choices"]
    weight = next(model.parameters())
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        for more in ({}, {"stream": True}):  # a stream that has not begun has a status too
            failed = client.post("/v1/completions", json=body | more)
            assert (failed.status_code, failed.json()["error"]["code"]) == (500, "model_failed")
            assert "are not numbers" in failed.json()["error"]["message"]
    finally:
        with torch.no_grad():
            weight.copy_(kept)
    assert client.post("/v1/completions", json=body).json()["choices"] == good


def test_nobody_waits_for_a_whole_answer(
    client: httpx.Client, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = service.engine.batch.decode
    monkeypatch.setattr(service.engine.batch, "decode", lambda: (time.sleep(0.005), decode())[1])
    n_before = service.engine.stats().cancelled
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=LONG, timeout=httpx.Timeout(30, read=0.5))
    assert eventually(lambda: service.engine.stats().cancelled == n_before + 1)
    assert service.engine.stats().active == 0


def test_a_completion_that_asks_for_no_number_of_tokens_gets_what_the_server_gives_at_most(
    model: Model,
) -> None:
    with serving(service_of(model, max_tokens=5)) as address, httpx.Client(base_url=address) as client:
        asked = {"model": NAME, "prompt": "abc", "temperature": 0}
        whole = client.post("/v1/completions", json=asked)
        assert (whole.status_code, whole.json()["usage"]["completion_tokens"]) == (200, 5)
        assert client.post("/v1/completions", json=asked | {"max_tokens": 16}).status_code == 400
        schemas = client.get("/openapi.json").json()["components"]["schemas"]
        described = schemas["CompletionRequest"]["properties"]["max_tokens"]
        assert (described["default"], described["maximum"]) == (5, 5)


def test_a_full_queue_a_late_answer_and_a_wrong_key(model: Model) -> None:
    service = service_of(model, timeout_s=0.2, n_slots=1, max_queue=1)
    with serving(service, key="secret") as address, httpx.Client(base_url=address, timeout=30) as client:
        for header in ({}, {"authorization": "Bearer secre"}, {"authorization": "Basic secret"}):
            response = client.post("/v1/completions", json=LONG, headers=header)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/metrics").status_code == 401
        assert client.get("/health", headers={"host": "elsewhere"}).status_code == 200
        client.headers["authorization"] = "Bearer secret"
        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(client.post, "/v1/completions", json=LONG) for _ in range(2)]
            assert eventually(lambda: service.engine.stats().queued == 1)
            refused = client.post("/v1/completions", json=LONG | {"stream": True})
            late = {one.result().status_code for one in asked}
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["message"] == "all slots and the queue are taken; ask again in 1 s"
        assert late == {504}
        assert "longer than the 0.2 s" in asked[0].result().json()["error"]["message"]
        *_, last = client.post("/v1/completions", json=LONG | {"stream": True}).text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
        assert eventually(lambda: service.engine.stats().active == 0)
