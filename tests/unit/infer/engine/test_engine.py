"""Continuous batching on real tiny models: a request gets what it would get alone, whatever else is in flight."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch

from caramba.config.model import ModelSpec
from caramba.data import ByteTokenizer
from caramba.errors import CacheFull, CheckpointError, ConfigError, EngineClosed, QueueFull
from caramba.infer import generate
from caramba.infer.engine import Engine, Event, RequestHandle, slots
from caramba.model import Model, build_model
from tests.unit.infer.test_generator import byte_spec, sharp
from tests.unit.model.model_specs import block, looped, spec, transformer

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [3], [9, 8, 7, 6], [5, 5]]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.3},
    {"temperature": 0},
    {"top_k": 5, "min_p": 0.1},
    {},
    {"temperature": 0.7, "top_p": 0.5, "top_k": 4},
]


@pytest.fixture(scope="module")
def model() -> Model:
    return sharp(transformer("latent_gate", repeat=1))


def architecture(name: str) -> ModelSpec:
    """One block of this attention; in a topology that runs it again if that is named before it."""
    if name == "learned_positions":
        return spec(block("window"), max_positions=32)
    kind, _, inner = name.rpartition(" ")
    return looped(kind, inner, times=3) if kind else transformer(inner, repeat=1)


def submit_all(engine: Engine) -> list[RequestHandle]:
    return [
        engine.submit(prompt, seed=7 + index, max_new_tokens=2 + index, **settings)
        for index, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True))
    ]


def run(engine: Engine) -> int:
    n_steps = 1
    while engine.step():
        n_steps += 1
    return n_steps


@pytest.mark.parametrize(
    ("name", "kind", "chunk", "form"),
    [
        ("gqa_scaled", "fp32", 4, "eager"),
        ("decoupled_gate", "fp32", 64, "eager"),
        ("latent_gate", "fp32", 64, "eager"),
        ("learned_positions", "fp32", 10, "eager"),
        ("gqa_scaled", "q8_0", 4, "eager"),
        ("decoupled_gate", "q8_0", 4, "eager"),
        ("latent_gate", "mixed", 64, "eager"),
        ("latent_first", "fp32", 64, "rows"),
        ("Cyclic gqa_scaled", "q8_0", 4, "eager"),
        ("Cyclic latent_gate", "fp32", 64, "eager"),
        ("Recurrent decoupled_gate", "fp32", 64, "eager"),
        ("Recurrent latent_first", "fp32", 4, "rows"),
        ("Recurrent decoupled_gate", "q8_0", 4, "eager"),
    ],
)
def test_every_request_gets_what_it_would_get_alone(name: str, kind: str, chunk: int, form: str) -> None:
    model = sharp(architecture(name))
    engine = Engine(model, n_slots=3, max_len=32, prefill_chunk=chunk, cache_kind=kind)
    tickets = submit_all(engine)
    shapes: list[tuple[int, ...]] = []
    handle = model.embedder.register_forward_hook(lambda _, given, out: shapes.append(tuple(given[0].shape)))
    run(engine)
    handle.remove()
    # New prompts that fit a chunk run in one row; rows that are not of one forward run alone.
    assert ((1, 13) in shapes) == (chunk == 64 and form == "eager" and kind == "fp32")
    assert ((3, 1) in shapes) == (form == "eager")
    for index, ticket in enumerate(tickets):
        options = {
            "seeds": [7 + index],
            "max_new_tokens": 2 + index,
            "cache_kind": kind,
            **SETTINGS[index],
        }
        (alone,) = generate(model, [PROMPTS[index]], **options)
        assert ticket.tokens == alone.tokens
        assert ticket.logprobs == pytest.approx(alone.logprobs, rel=1e-4, abs=1e-4)
        assert list(ticket) == [
            *(Event(*pair) for pair in zip(ticket.tokens, ticket.logprobs, strict=True)),
            Event(finish_reason="length"),
        ]
    stats = engine.stats()
    assert (stats.finished, stats.active, stats.queued, stats.decode) == (5, 0, 0, form)
    assert stats.prefilled_tokens == sum(map(len, PROMPTS))
    assert stats.new_tokens == 2 + 3 + 4 + 5 + 6
    # Rows share steps: no more than the longest requests need one after the other.
    assert stats.steps < 12


def test_rows_of_a_quantised_cache_pack_their_own_tails() -> None:
    model = sharp(transformer("decoupled_gate", repeat=1))
    engine = Engine(model, n_slots=3, max_len=144, prefill_chunk=48, cache_kind="mixed")
    prompts = [[(3 * index + at) % 23 for at in range(n)] for index, n in enumerate((60, 126, 3))]
    tickets = [engine.submit(prompt, max_new_tokens=12, temperature=0.5) for prompt in prompts]
    packed = [0, 0, 0]
    while engine.step():
        packed = [max(n, row.caches[0].n_packed or 0) for n, row in zip(packed, engine.batch.slots.rows, strict=True)]
    assert (engine.stats().decode, packed) == ("eager", [64, 128, 0])
    for prompt, ticket in zip(prompts, tickets, strict=True):
        options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.5, "cache_kind": "mixed"}
        (alone,) = generate(model, [prompt], prefill_chunk=48, **options)
        assert ticket.tokens == alone.tokens
    assert len({ticket.tokens for ticket in tickets}) == 3


def test_nothing_of_a_request_is_left_in_its_slot(model: Model) -> None:
    engine = Engine(model, n_slots=1, max_len=32, cache_kind="fp32")
    with torch.inference_mode():
        for cache in engine.batch.slots.ctx.caches:
            for buffer in cache.allocations:
                buffer.fill_(float("nan"))
    engine.submit(PROMPTS[1], max_new_tokens=8)
    run(engine)
    assert all(not buffer.any() for cache in engine.batch.slots.ctx.caches for buffer in cache.allocations)
    second = engine.submit([3], max_new_tokens=4)
    run(engine)
    assert second.tokens == generate(model, [[3]], max_new_tokens=4, cache_kind="fp32")[0].tokens


def test_end_marks_and_stop_texts_free_the_slot_at_once() -> None:
    model, tokenizer = sharp(byte_spec()), ByteTokenizer()
    options: dict[str, Any] = {"max_new_tokens": 24, "cache_kind": "fp32"}
    (free,) = generate(model, ["def f"], tokenizer, **options)
    assert free.text is not None
    stop = free.text[5:7]
    (expected,) = generate(model, ["def f"], tokenizer, stop=(stop,), **options)
    engine = Engine(model, n_slots=2, max_len=64, cache_kind="fp32", tokenizer=tokenizer)
    stopped = engine.submit(free.prompt, max_new_tokens=24, stop=(stop,))
    mark = free.tokens[4]
    ended = engine.submit(free.prompt, max_new_tokens=24, eos_token_id=mark)
    n_steps = run(engine)
    assert (stopped.tokens, stopped.finish_reason) == (expected.tokens, "stop")
    assert (ended.tokens, ended.finish_reason) == (free.tokens[: free.tokens.index(mark)], "stop")
    assert n_steps == 1 + len(expected.tokens)


def test_a_cancelled_request_leaves_at_the_next_step(model: Model) -> None:
    engine = Engine(model, n_slots=1, max_len=64, cache_kind="fp32")
    running, waiting, last = (engine.submit([index], max_new_tokens=10) for index in (1, 2, 3))
    for _ in range(4):
        engine.step()
    running.cancel()
    waiting.cancel()
    engine.step()
    assert (running.finish_reason, waiting.finish_reason) == ("cancelled", "cancelled")
    assert (len(running.tokens), waiting.tokens, engine.stats().prefilled_tokens) == (3, (), 2)
    run(engine)
    assert last.tokens == generate(model, [[3]], max_new_tokens=10, cache_kind="fp32")[0].tokens


def test_what_fails_ends_its_requests_and_the_engine_goes_on(model: Model) -> None:
    engine = Engine(model, n_slots=2, max_len=32, cache_kind="fp32")
    tickets = [engine.submit([token], max_new_tokens=6) for token in (1, 2)]
    engine.step()

    def fail(*_: object) -> None:
        raise CacheFull("no more memory")

    handle = model.head.register_forward_pre_hook(fail)
    engine.step()
    handle.remove()
    tickets.append(engine.submit([3], max_new_tokens=6))
    run(engine)
    assert [ticket.finish_reason for ticket in tickets] == ["error", "error", "length"]
    with pytest.raises(CacheFull, match="no more memory"):
        tickets[0].wait(0)
    assert tickets[2].tokens == generate(model, [[3]], max_new_tokens=6, cache_kind="fp32")[0].tokens
    assert engine.stats().failed == 2


def test_a_device_that_fails_closes_the_engine_and_leaves_nobody_waiting(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device lost")

    engine = Engine(model, n_slots=1, max_len=64, cache_kind="fp32")
    tickets = [engine.submit([1], max_new_tokens=50) for _ in range(3)]
    engine.step()
    monkeypatch.setattr(engine.batch.slots.sampler, "read", fail)
    monkeypatch.setattr(engine.batch.slots.rows[0], "clear", fail)
    engine.start()
    for ticket in tickets:
        with pytest.raises(RuntimeError, match="device lost"):
            ticket.wait(120)
    engine.close()
    with pytest.raises(EngineClosed, match="by a failure: device lost"):
        engine.submit([1], max_new_tokens=2)


def test_logits_that_are_no_numbers_end_their_request_alone(model: Model) -> None:
    engine = Engine(model, n_slots=2, max_len=32, cache_kind="fp32")
    poisoned, other = (engine.submit([token], max_new_tokens=5) for token in (1, 3))
    engine.step()
    assert engine.batch.slots.logits is not None
    with torch.inference_mode():
        engine.batch.slots.logits[0] = float("nan")
    run(engine)
    assert (poisoned.finish_reason, other.finish_reason) == ("error", "length")
    with pytest.raises(CheckpointError, match="not numbers"):
        poisoned.wait(0)
    assert other.tokens == generate(model, [[3]], max_new_tokens=5, cache_kind="fp32")[0].tokens


def test_bad_requests_are_refused_and_leave_no_trace(model: Model) -> None:
    engine = Engine(model, n_slots=1, max_len=16, max_queue=0)
    for prompt, values, message in [
        ([], {}, "the prompt is empty"),
        ([1, 23], {}, "token 23, the model's vocabulary is 0 to 22"),
        ([1] * 10, {"max_new_tokens": 7}, "10 tokens and max_new_tokens=7 exceed the 16 tokens of a slot"),
        ([1], {"max_new_tokens": 7, "cache_kind": "fp16"}, "cache_kind is the same for all requests"),
        ([1], {"max_new_tokens": 7, "stop": ("a",)}, "stop texts need a tokenizer"),
        ([1], {"temperature": -1}, "temperature"),
    ]:
        with pytest.raises(ConfigError, match=message):
            engine.submit(prompt, **values)
    engine.submit([1], max_new_tokens=2)
    with pytest.raises(QueueFull, match="1 requests wait") as refused:
        engine.submit([1], max_new_tokens=2)
    assert refused.value.retry_after >= 1
    stats = engine.stats()
    assert (stats.submitted, stats.refused, stats.queued) == (1, 1, 1)
    with pytest.raises(ConfigError, match="cache_kind=auto"):
        Engine(model, cache_kind="auto")
    positions = build_model(spec(block("standard"), max_positions=8), seed=0)
    with pytest.raises(ConfigError, match="max_len=16 exceeds the 8 positions"):
        Engine(positions, max_len=16)


def test_the_collector_leaves_alone_what_was_there_before_the_thread(model: Model) -> None:
    had = gc.get_freeze_count()
    gc.unfreeze()  # what is frozen in this process
    try:
        first, second = (Engine(model, n_slots=1, max_len=64) for _ in range(2))
        assert gc.get_freeze_count() == 0
        for engine in (first, second):
            engine.start().submit([1], max_new_tokens=2).wait(120)  # the thread runs then
        assert gc.get_freeze_count() > 1000
        first.close()
        first.close()
        assert gc.get_freeze_count() > 1000, "the second still runs"
        second.close()
        assert gc.get_freeze_count() == 0
        gc.freeze()
        third = Engine(model, n_slots=1, max_len=64).start()
        third.close()
        assert gc.get_freeze_count() > 1000, "what others have frozen stays"
    finally:
        gc.unfreeze()
        if had:
            gc.freeze()


def test_threads_submit_while_the_engine_runs(model: Model) -> None:
    with Engine(model, n_slots=3, max_len=32, cache_kind="fp32") as engine:
        found: dict[int, tuple[int, ...]] = {}

        def ask(seed: int) -> None:
            ticket = engine.submit([1, 2], seed=seed, max_new_tokens=6, temperature=2.0)
            found[seed] = tuple(event.token for event in ticket if event.token is not None)

        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        left = engine.submit([1], max_new_tokens=21)
        engine.close(drain=True)
        assert left.finish_reason == "length"
    alone = generate(model, [[1, 2]] * 8, seeds=range(8), max_new_tokens=6, temperature=2.0, cache_kind="fp32")
    assert found == {row.seed: row.tokens for row in alone}
    with pytest.raises(EngineClosed, match="closed"):
        engine.submit([1], max_new_tokens=2)


def test_requests_that_come_together_begin_together_where_a_batch_timeout_waits_for_them(
    model: Model,
) -> None:
    values: dict[str, Any] = {"max_len": 32, "cache_kind": "fp32"}

    def two(engine: Engine) -> float:
        """Seconds from the first request to its first token, with another 20 ms behind it."""
        began, first = time.monotonic(), engine.submit([1, 2], max_new_tokens=6)
        time.sleep(0.02)
        if not engine.config.batch_timeout:
            next(iter(first))  # on a busy machine it may not have begun yet
        second = engine.submit([3], max_new_tokens=6)
        next(iter(first))
        seconds = time.monotonic() - began
        assert [first.wait(120), second.wait(120)] == ["length", "length"]
        return seconds

    with Engine(model, n_slots=3, **values) as engine:
        two(engine)
        assert engine.stats().steps > 6
    with Engine(model, n_slots=3, batch_timeout=1.0, **values) as engine:
        assert 1.0 <= two(engine) < 10.0  # from the first on, not from the last
        assert engine.stats().steps == 6
    with Engine(model, n_slots=2, batch_timeout=60, **values) as engine:
        assert two(engine) < 30  # a full batch waits for nobody
        left = engine.submit([1], max_new_tokens=2)
        left.cancel()
        assert left.wait(120) == "cancelled"
        engine.submit([1], max_new_tokens=2)
        engine.close(drain=True)  # nor does an engine that ends
        assert (engine.stats().steps, engine.stats().finished) == (8, 3)
    waiting = Engine(model, n_slots=2, batch_timeout=60, **values).start()
    left = waiting.submit([1], max_new_tokens=2)
    time.sleep(0.02)  # it waits for another
    waiting.close()
    assert (left.finish_reason, waiting.stats().prefilled_tokens) == ("cancelled", 0)
    for wrong in (-1, float("nan")):
        with pytest.raises(ConfigError, match="batch_timeout"):
            Engine(model, batch_timeout=wrong, **values)


def test_a_graph_is_captured_again_where_the_weights_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, where a graph is a function that reads the weights at the addresses of its capture."""
    model = sharp(transformer("gqa_scaled", repeat=1))
    weight = next(layer for _, layer in model.attention_layers()).projection.get_parameter("k.weight")
    read: list[int] = []

    def captured(given: torch.Tensor, run: Any, trial: Any, **_: Any) -> tuple[Any, int]:
        trial(given)
        if given.ndim == 1:  # tokens: a forward, and no draw
            read.append(weight.data_ptr())
        return run, weight.data_ptr()

    def replay_graph(graph: tuple[Any, int], given: torch.Tensor) -> torch.Tensor:
        assert given.ndim > 1 or graph[1] == weight.data_ptr()
        return graph[0](given)

    monkeypatch.setattr(slots, "capture_graph", captured)
    monkeypatch.setattr(slots, "replay_graph", replay_graph)
    engine = Engine(model, n_slots=1, max_len=32)
    engine.batch.slots.form = "graph"
    wanted = generate(model, [[1, 2, 3]], max_new_tokens=9, temperature=0)[0].tokens
    for layer in model.modules():  # as a model that nothing has generated from
        if isinstance(layer, torch.nn.Linear):
            layer.weight.data = layer.weight.detach().clone()
    ticket = engine.submit([1, 2, 3], max_new_tokens=9, temperature=0)
    for _ in range(4):
        engine.step()
    assert len(read) == 1
    generate(model, [[4]], max_new_tokens=1)  # lays weights side by side
    run(engine)
    assert ticket.tokens == wanted
    assert len(set(read)) == len(read) == 2
