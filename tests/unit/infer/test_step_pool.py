"""Generations of one length bucket share a context and what was captured on it; their text is as without."""

from __future__ import annotations

from typing import Any

import pytest

from caramba.config.cache_policy import Q_CHUNK_BUCKETS, step_capacity
from caramba.config.kvcache import KVCacheKind
from caramba.infer import Generator, device_steps
from caramba.model import build_model
from tests.unit.model.model_specs import transformer


def test_capacities_double_and_meet_the_buckets_of_the_decode_plan() -> None:
    assert [step_capacity(n, None) for n in (1, 512, 513, 2048, 2049, 16384, 65536)] == [
        512,
        512,
        1024,
        2048,
        4096,
        16384,
        65536,
    ]
    assert all(step_capacity(limit, None) == limit for limit, _ in Q_CHUNK_BUCKETS)
    assert step_capacity(100, 300) == 300  # no more than the model has positions for
    assert step_capacity(400, 300) == 400  # refused elsewhere, never cut


def test_a_bucket_is_used_again_and_gives_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "compiled_logits", lambda *_: device_steps.next_logits)
    model = build_model(transformer("latent_gate"), seed=0).double()
    options: dict[str, Any] = {"max_new_tokens": 3, "temperature": 1.2, "repetition_penalty": 1.3}
    stepped = Generator(model, compiled=True, **options)
    made: list[int] = []
    inner = model.new_context
    monkeypatch.setattr(model, "new_context", lambda *a, **k: (made.append(a[1]), inner(*a, **k))[1])
    for prompts in ([[1, 2, 3], [4]], [[9, 8, 7, 6, 5], [2, 2, 2]]):
        found = stepped.generate(prompts)
        assert made == [512]
        assert stepped.stats.decode == "compiled"
        assert [row.tokens for row in found] == [
            row.tokens for row in Generator(model, **options).generate(prompts)
        ]
        made[1:] = []
    # Another batch, another length, other weights: a context of their own; the one used longest ago goes.
    stepped.generate([[1]])
    stepped.generate([[1] * 520])
    assert made == [512, 512, 1024]
    stepped.generate([[1], [2]])
    assert made == [512, 512, 1024, 512]
    model.float()
    stepped.generate([[1], [2]])
    assert made[4:] == [512]
    assert stepped.stats.cache_bytes == 2 * inner(1, 512, static=True).nbytes()


def test_a_quantised_cache_is_used_again_from_the_place_where_its_blocks_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_steps, "compiled_logits", lambda *_: device_steps.next_logits)
    model = build_model(transformer("latent"), seed=0)
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 1.0, "cache_kind": KVCacheKind.MIXED}
    stepped = Generator(model, compiled=True, **options)
    made: list[int] = []
    inner = model.new_context
    monkeypatch.setattr(model, "new_context", lambda *a, **k: (made.append(a[1]), inner(*a, **k))[1])
    places: list[int] = []
    for index, prompt in enumerate(([1, 2] * 95, [5, 4] * 63)):  # both pack while they decode
        found = stepped.generate([prompt])
        assert stepped.stats.decode == "compiled"
        assert made == ([] if index else [1, 512])  # one token tells whether the format takes such steps
        assert found[0].tokens == Generator(model, **options).generate([prompt])[0].tokens
        made.clear()
        (kept,) = stepped.pool._kept.values()
        assert kept.ctx.n_packed == 64 * ((len(prompt) + 4) // 64)
        assert kept.steps.step.packed.tolist() == [kept.ctx.n_packed]  # type: ignore[union-attr]
        places += [part.data_ptr() for cache in kept.ctx.caches for part in cache.memory]
    assert places[: len(places) // 2] == places[len(places) // 2 :]
    stepped.generate([[1] * 20])  # so few tokens stay in 16 bits, which those of a bucket would not
    assert made == [26]
