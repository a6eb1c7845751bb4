"""States of memory slots that an engine keeps: matched at snapshots alone, within their bytes, and no token changes."""

from __future__ import annotations

import math

import pytest
import torch

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.infer import Generator
from caramba.infer.engine import Engine
from caramba.infer.engine.prefix import SnapshotCache
from caramba.model import Model, build_model
from caramba.model.memory import STATISTICS
from caramba.serve.metrics import Metrics
from tests.unit.infer.engine.test_engine import run
from tests.unit.layer.test_memory_bank import VOCAB, memory_model
from tests.unit.model.model_specs import transformer

PREFIX = [(7 * index) % VOCAB for index in range(45)]
CHUNK = 20


def engine_of(model: Model, cache_size: float = 1.0) -> Engine:
    return Engine(model, n_slots=2, max_len=200, prefill_chunk=CHUNK, use_memory_cache=True, cache_size=cache_size)


def ask(engine: Engine, prompt: list[int], n: int = 8) -> list[int]:
    ticket = engine.submit(prompt, max_new_tokens=n, temperature=0.0)
    run(engine)
    return list(ticket.tokens)


def test_prompts_continue_from_the_longest_snapshot_and_change_no_token() -> None:
    model = memory_model()
    engine = engine_of(model)
    prompt, hits, reused = list(PREFIX), 0, 0
    for turn in range(4):
        # The first turn has no snapshot; later ones continue after the last answer, whose last token never ran.
        expected = 0 if turn == 0 else len(prompt) - 3
        answer = ask(engine, prompt)
        (alone,) = Generator(model, max_new_tokens=8, temperature=0.0).generate([prompt])
        assert answer == list(alone.tokens)
        hits, reused = hits + (turn > 0), reused + expected
        stats = engine.stats()
        assert (stats.prefix_hits, stats.prefix_tokens) == (hits, reused)
        prompt = [*prompt, *answer, turn, 5]
    before = engine.stats()
    ask(engine, [*PREFIX[:43], 60, 60])  # parts after the snapshot of 40 tokens
    assert engine.stats().prefix_tokens - before.prefix_tokens == 2 * CHUNK
    ask(engine, [59, *PREFIX[1:]])
    assert engine.stats().prefix_hits == before.prefix_hits + 1


def test_concurrent_requests_on_one_prefix_do_not_mix() -> None:
    model = memory_model()
    engine = engine_of(model)
    ask(engine, PREFIX)
    prompts = [[*PREFIX, 1, 2], [*PREFIX, 3], [*PREFIX[:41], 4]]
    tickets = [engine.submit(prompt, max_new_tokens=12, temperature=0.0) for prompt in prompts]
    run(engine)
    for prompt, ticket in zip(prompts, tickets, strict=True):
        (alone,) = Generator(model, max_new_tokens=12, temperature=0.0).generate([prompt])
        assert ticket.tokens == alone.tokens
    assert engine.stats().prefix_hits == 3


def test_a_full_cache_of_states_drops_the_least_recently_used() -> None:
    model = memory_model()
    # Each row's state and the two counts of each of two caches
    state_bytes = model.new_context(1, 64, KVCacheKind.FP32).nbytes() + 2 * 16
    engine = engine_of(model, cache_size=(2 * state_bytes + 1) / 1e6)
    ask(engine, PREFIX)
    stats = engine.stats()
    assert stats.prefix_bytes == 2 * state_bytes
    ask(engine, [*PREFIX[:21], 3])  # the snapshot of 20 tokens has been dropped for later ones
    assert engine.stats().prefix_hits == 0


def test_use_of_slots_in_texts_that_have_ended_goes_to_the_metrics() -> None:
    model = memory_model()
    engine = Engine(model, n_slots=2, max_len=200, prefill_chunk=CHUNK)
    metrics = Metrics(engine.stats)

    def shown() -> dict[str, float]:
        lines = [line for line in metrics.text().decode().splitlines() if line.startswith("caramba_memory_")]
        return {name: float(value) for name, value in map(str.split, lines)}

    ask(engine, PREFIX[:3], n=4)  # nothing leaves the window of 7
    assert len(shown()) == 4
    assert all(math.isnan(value) for value in shown().values())
    ask(engine, PREFIX)
    stats = model.get_memory_stats(torch.tensor([PREFIX[: 7 + CHUNK]]))
    expected = {f"caramba_memory_{key.removeprefix('memory_')}": stats[key] for key in STATISTICS}
    assert shown() == expected
    ask(engine, PREFIX[20:])  # one of 32 is measured
    assert shown() == expected
    plain = Engine(build_model(transformer("standard"), seed=0), n_slots=1, max_len=20)
    assert b"caramba_memory" not in Metrics(plain.stats).text()


def test_snapshots_are_not_cut_nor_replaced_by_longer_texts() -> None:
    cache = SnapshotCache(limit_bytes=400)
    state = {"mass": torch.zeros(25)}
    for n_tokens in (20, 30, 40):
        cache.put(range(n_tokens), state)
    assert cache.nbytes == 300
    matched = [cache.match(range(n)) for n in (20, 21, 35, 41, 90)]
    assert [found and found[0] for found in matched] == [None, 20, 30, 40, 40]
    cache.put(range(40), state)
    assert cache.nbytes == 300


@pytest.mark.parametrize(
    ("has_slots", "values", "message"),
    [
        (False, {"use_memory_cache": True}, "this model has none; use prefix_cache_bytes"),
        (True, {"use_memory_cache": True, "prefix_cache_bytes": 9}, "leave prefix_cache_bytes at 0"),
        (True, {"use_memory_cache": True, "cache_size": 0}, "greater than 0"),
    ],
)
def test_caches_that_do_not_go_together_are_refused(has_slots: bool, values: dict[str, int], message: str) -> None:
    model = memory_model() if has_slots else build_model(transformer("standard"), seed=0)
    with pytest.raises(ConfigError, match=message):
        Engine(model, n_slots=1, max_len=32, **values)
