"""caramba serve as its users meet it: the openai client, many at once, the document that it gives, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caramba.cli import main
from caramba.data import ByteTokenizer, load_tokenizer
from caramba.errors import EngineClosed
from caramba.export.write import export_model
from caramba.infer import ModelBundle, generate
from caramba.infer.dialogue import Dialogue
from caramba.model import Model
from caramba.serve import schema, server
from tests.integration.commands import TIMEOUT_S, served
from tests.integration.conformance import faults
from tests.integration.values import values_of
from tests.unit.serve.served import CONTEXT, NAME, byte_model, events, eventually, service_of, serving

TEMPLATE = "{% for turn in messages %}[{{ turn.role }}] {{ turn.content }}\n{% endfor %}[assistant]"
N_CLIENTS, N_NEW = 200, 12
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
ANSWERS = {
    "/v1/completions": (schema.Completion, schema.Completion),
    "/v1/chat/completions": (schema.ChatCompletion, schema.ChatChunk),
}
JSON, EVENTS = "application/json", "text/event-stream"
ENDLESS = {"prompt": "c", "max_tokens": 400, "temperature": 0}


@pytest.fixture(scope="module")
def model() -> Model:
    return byte_model()


@pytest.fixture(scope="module")
def folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "bytes"
    opened = ModelBundle(model, path, {}, tokenizer=ByteTokenizer(), context=CONTEXT)
    export_model(opened, path, format="hf", role="student")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def test_the_openai_client_talks_to_the_command_and_sigterm_ends_it(
    folder: Path, model: Model, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    openai = pytest.importorskip("openai")
    words = "--api-key-env", "SERVE_TEST_KEY", "--max-batch", "2"
    monkeypatch.setenv("SERVE_TEST_KEY", "secret")
    with served(folder, folder.parent, cache, *words) as (process, address):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0)
        assert [one.id for one in client.models.list()] == ["bytes"]
        prompt = "def f(x):"
        (row,) = generate(model, [prompt], ByteTokenizer(), max_new_tokens=24, seed=3, **SAMPLED)
        asked = {"model": "bytes", "prompt": prompt, "max_tokens": 24, "seed": 3, **SAMPLED}
        found = client.completions.create(**asked)
        assert (found.choices[0].text, found.usage.completion_tokens) == (row.text, len(row.tokens))
        assert "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)) == row.text

        turns = [{"role": "user", "content": "Hi"}]
        ids = Dialogue(load_tokenizer(folder), TEMPLATE).encode(turns)
        (row,) = generate(model, [ids], ByteTokenizer(), max_new_tokens=24, seed=3, **SAMPLED)
        talk = {"model": "bytes", "messages": turns, "max_completion_tokens": 24, "seed": 3, **SAMPLED}
        assert client.chat.completions.create(**talk).choices[0].message.content == row.text.lstrip()
        chunks = client.chat.completions.create(**talk, stream=True, extra_body={"min_p": 0.0})
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == row.text.lstrip()

        with pytest.raises(openai.BadRequestError, match="exceed the context of 1024"):
            client.completions.create(model="bytes", prompt="a" * 1020)
        with pytest.raises(openai.AuthenticationError, match="no valid API key"):
            openai.OpenAI(base_url=f"{address}/v1", api_key="no", max_retries=0).models.list()

        # Long enough to be cut off, short enough for the time that a stopping server gives it on a busy machine.
        stream = client.completions.create(model="bytes", **ENDLESS | {"max_tokens": 150}, stream=True)
        first = next(iter(stream)).choices[0].text
        process.send_signal(signal.SIGTERM)
        text = first + "".join(chunk.choices[0].text for chunk in stream)  # it is finished first
        (row,) = generate(model, ["c"], ByteTokenizer(), max_new_tokens=150, temperature=0)
        assert text == row.text
        assert process.wait(TIMEOUT_S) == 0
        began, ended = (folder.parent / "log.txt").read_text().splitlines()
        assert f" at {address}/v1" in began
        assert ended.endswith("stopped")


def test_two_hundred_clients_get_each_their_own_text(model: Model) -> None:
    prompts = [f"one of many clients, {index}: {'x' * (index % 17)}" for index in range(N_CLIENTS)]
    service = service_of(model, n_slots=32, max_len=128, prefix_cache_bytes=1 << 20)

    async def ask(port: int, index: int) -> str:
        """Bare sockets: two hundred clients of a library would take longer than the server."""
        asked = {"model": NAME, "prompt": prompts[index], "max_tokens": N_NEW, "seed": index, "stream": True}
        body = json.dumps(asked | SAMPLED).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(HEAD % len(body) + body)
        head, *chunks = (await reader.read()).decode().split("data: ")
        writer.close()
        assert head.startswith("HTTP/1.1 200 OK")
        found = [json.loads(chunk.partition("\n")[0])["choices"][0] for chunk in chunks[:-1]]
        assert chunks[-1].startswith("[DONE]")
        assert found[-1]["finish_reason"] in ("stop", "length")
        return "".join(one["text"] for one in found)

    async def ask_all(port: int) -> list[str]:
        return await asyncio.gather(*(ask(port, index) for index in range(N_CLIENTS)))

    with serving(service) as address:
        texts = asyncio.run(ask_all(int(address.rpartition(":")[2])))
        stats = service.engine.stats()
    assert (stats.finished, stats.failed, stats.cancelled) == (N_CLIENTS, 0, 0)
    assert stats.prefix_hits > 0
    settings = {"max_new_tokens": N_NEW, **SAMPLED}
    rows = generate(model, prompts, ByteTokenizer(), seeds=range(N_CLIENTS), **settings)
    assert texts == [row.text for row in rows]
    for index in range(0, N_CLIENTS, 20):
        (row,) = generate(model, [prompts[index]], ByteTokenizer(), seed=index, **settings)
        assert texts[index] == row.text
    assert len(set(texts)) > N_CLIENTS * 0.9


@pytest.fixture(scope="module")
def client(model: Model) -> Iterator[httpx.Client]:
    with serving(service_of(model)) as address, httpx.Client(base_url=address, timeout=30) as client:
        yield client


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", ANSWERS)
def test_the_document_is_true(client: httpx.Client, path: str, is_stream: bool) -> None:
    document = client.get("/openapi.json").json()
    assert {place for place, item in document["paths"].items() if "post" in item} == set(ANSWERS)
    asked = document["paths"][path]["post"]

    def refused_by_document(value: object, described: dict[str, Any]) -> list[str]:
        return faults(value, described["content"][JSON]["schema"], document)

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        body = data.draw(values_of(asked["requestBody"]["content"][JSON]["schema"], document))
        if is_stream or "stream" in body:  # absent is the same as false
            body["stream"] = is_stream
        if "chat" in path and body.get("max_tokens") and body.get("max_completion_tokens"):
            assert refused_by_document(body, asked["requestBody"])
            del body["max_tokens"]  # the document's `not`, which the strategy does not know
        if "chat" in path and body.get("top_logprobs") and not body.get("logprobs"):
            assert refused_by_document(body, asked["requestBody"])
            body["logprobs"] = True
        if body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
            body["max_tokens"] = 3  # else all that the context holds
        assert not refused_by_document(body, asked["requestBody"])
        response = client.post(path, json=body)
        assert response.status_code == 200, response.text
        whole, chunk = ANSWERS[path]
        described = asked["responses"]["200"]
        if is_stream:
            assert EVENTS in described["content"]
            assert response.headers["content-type"].partition(";")[0] == EVENTS
            # OpenAPI 3.1 has no place for the schema of an event: the description names it.
            assert f"a {chunk.__name__} each" in described["description"]
            for found in events(response):
                assert not faults(found, document["components"]["schemas"][chunk.__name__], document)
                chunk.model_validate(found)
        else:
            assert response.headers["content-type"] == JSON
            assert not refused_by_document(response.json(), described)
            whole.model_validate(response.json())
        wrong = data.draw(st.sampled_from(sorted(body)))
        body |= {wrong: {"no": ["such thing"]}}  # an object of strings is what `metadata` takes
        assert refused_by_document(body, asked["requestBody"])
        refused = client.post(path, json=body)
        assert refused.status_code == 400, refused.text
        assert not refused_by_document(refused.json(), asked["responses"]["400"])
        schema.FailureBody.model_validate_json(refused.content, strict=True)

    check()


def test_what_is_got_is_what_the_document_describes(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    got: set[str] = set()
    for path, item in document["paths"].items():
        if "get" not in item:
            continue
        for name, status in {NAME: 200, "other": 404}.items() if "{model}" in path else ((NAME, 200),):
            response = client.get(path.replace("{model}", name))
            assert response.status_code == status
            content = item["get"]["responses"][str(status)]["content"]
            kind = response.headers["content-type"].partition(";")[0]
            assert kind in content
            if "schema" in content[kind]:
                assert not faults(response.json(), content[kind]["schema"], document)
                got.add(path)
    assert got == {"/v1/models", "/v1/models/{model}", "/health"}


def test_a_value_that_a_schema_does_not_allow_is_seen(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    body = {"model": NAME, "prompt": "a", "max_tokens": 3, "logprobs": 0}
    answer = client.post("/v1/completions", json=body).json()
    assert not faults(answer, schemas["Completion"], document)
    (choice,) = answer["choices"]
    for broken, place in (
        ({key: value for key, value in answer.items() if key != "id"}, "$: no id"),
        (answer | {"more": 1}, "$: more is not described"),
        (answer | {"object": "other"}, "$.object: 'other' is none of ['text_completion']"),
        (answer | {"created": 1.5}, "$.created: 1.5 is no integer"),
        (answer | {"choices": [choice, choice | {"text": None}]}, "$.choices[1].text: None is no string"),
        (answer | {"usage": {"prompt_tokens": 1}}, "$.usage: {'prompt_tokens': 1} is none of"),
        (
            answer | {"choices": [choice | {"finish_reason": "error"}]},
            "$.choices[0].finish_reason: 'error' is",
        ),
    ):
        (line,) = faults(broken, schemas["Completion"], document)
        assert line.startswith(place)
    for key, value in (("temperature", -0.5), ("top_p", 0), ("seed", 2**63), ("n", True), ("stop", "")):
        assert not faults(body, schemas["CompletionRequest"], document)
        assert faults(body | {key: value}, schemas["CompletionRequest"], document), key
    talk = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    # The document's `not`, which drawn bodies seldom meet.
    for keys, status in (
        ({"max_completion_tokens": None}, 200),
        ({"max_completion_tokens": 3, "user": "a"}, 400),
        ({"logprobs": True, "top_logprobs": 2}, 200),
        ({"logprobs": False, "top_logprobs": 0}, 200),
        ({"top_logprobs": 2, "user": "a"}, 400),
    ):
        found = faults(talk | keys, schemas["ChatRequest"], document)
        response = client.post("/v1/chat/completions", json=talk | keys)
        assert (len(found), response.status_code) == (int(status == 400), status)


def test_a_stopping_server_tells_those_whom_it_cuts_off(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DRAIN_SECONDS", 0.05)
    service = service_of(model, n_slots=1, max_len=4096, max_tokens=4000)
    body = {"model": NAME, "stream": True} | ENDLESS | {"max_tokens": 4000}
    stack = contextlib.ExitStack()
    address = stack.enter_context(serving(service))
    with httpx.Client(base_url=address, timeout=60) as client, ThreadPoolExecutor(2) as threads:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            waiting = threads.submit(client.post, "/v1/completions", json=body | {"stream": False})
            assert eventually(lambda: service.engine.stats().queued == 1)
            ended = threads.submit(stack.close)
            *_, last = [line for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        assert waiting.result().status_code == 503
        ended.result()
    assert (service.engine.stats().cancelled, service.engine.stats().active) == (2, 0)


def test_a_failed_engine_ends_the_server(model: Model) -> None:
    service = service_of(model)
    listener = server.bind("127.0.0.1", 0)
    listener.listen(server.BACKLOG)
    place = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/completions"

    def fail_and_ask() -> httpx.Response:
        assert eventually(lambda: httpx.get(place).status_code == 405)
        service.engine.close()
        return httpx.post(place, json={"model": NAME, "prompt": "a"})

    with listener, ThreadPoolExecutor(1) as threads:
        asked = threads.submit(fail_and_ask)
        with pytest.raises(EngineClosed, match="no request is taken any more"):
            server.Server(service).serve_until_signalled(listener)
    found = asked.result()
    assert (found.status_code, found.json()["error"]["code"]) == (503, "engine_failed")


def test_what_cannot_be_served_is_said_with_status_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EMPTY_KEY", "")
    for words, text in (
        (("--host", "0.0.0.0"), "--host 0.0.0.0 is reached by other machines, and without a key"),
        (("--api-key-env", "EMPTY_KEY"), "--api-key-env EMPTY_KEY: the environment variable is not set"),
        (("--host", "203.0.113.1", "--api-key-env", "PATH"), "cannot listen on 203.0.113.1 port 0"),
        (("--max-connections", "0"), "argument --max-connections: got 0, expected 1 or more"),
        (("--port", "70000"), "argument --port: got 70000, expected 0 to 65535"),
        (("--compiled", "fast"), "argument --compiled: invalid choice: 'fast'"),
        (("--batch-timeout", "-1"), "argument --batch-timeout: got -1, expected seconds of 0 or more"),
        (("--batch-timeout", "nan"), "argument --batch-timeout: got nan, expected seconds of 0 or more"),
        (
            ("--batch-timeout", "2", "--timeout", "2"),
            "--batch-timeout 2 is not below --timeout 2: a request that waits alone",
        ),
        (("--timeout", "nan"), "argument --timeout: got nan, expected seconds above 0"),
        (
            ("--max-len", "16", "--max-tokens", "16"),
            "--max-tokens 16 leaves no room for a prompt in --max-len 16",
        ),
        (
            ("--cache-kind", "q9"),
            "cache_kind: got 'q9', expected 'fp32', 'fp16', 'bf16', 'q8_0', 'q4_0', 'nf4', 'mixed' or 'auto'",
        ),
        (
            ("--max-len", "1000000000000"),
            "16 slots and 0 prompts ahead, 1000000000000 tokens each, does not fit",
        ),
        (("--cache-kind", "auto"), "cache_kind=auto is chosen for one generation"),
        (
            ("--tempratur", "1"),
            "unrecognized arguments: --tempratur 1; caramba serve RUN|DIR [options]",
        ),
    ):
        capsys.readouterr()
        assert main(["serve", str(folder), "--device", "cpu", "--port", "0", *words]) == 2
        assert text in capsys.readouterr().err
