"""Generations of one length bucket share a context and what was captured on it; their text is as without."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.config.cache_policy import Q_CHUNK_BUCKETS, step_capacity
from caramba.config.kvcache import KVCacheKind
from caramba.infer import Generator, device_steps, step_pool
from caramba.infer.device_steps import DeviceDecoder, EagerDecoder
from caramba.infer.policy_measure import cache_bytes
from caramba.infer.step import StepState
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
    monkeypatch.setattr(device_steps, "compile_logits", lambda *_: device_steps.next_logits)
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
        assert [row.tokens for row in found] == [row.tokens for row in Generator(model, **options).generate(prompts)]
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
    monkeypatch.setattr(device_steps, "compile_logits", lambda *_: device_steps.next_logits)
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


class _Graph:
    """A captured step that is run anew at every replay."""

    def __init__(self, run: Callable[[Tensor], Tensor], fixed: Tensor, out: Tensor) -> None:
        self.run, self.fixed, self.out = run, fixed, out

    def replay(self) -> None:
        self.out.copy_(self.run(self.fixed))


def captured(
    given: Tensor, run: Callable[[Tensor], Tensor], trial: Callable[[Tensor], Tensor]
) -> tuple[_Graph, Tensor, Tensor]:
    fixed = given.clone()
    out = [trial(fixed) for _ in range(device_steps.WARM_UPS)][-1].clone()
    return _Graph(run, fixed, out), fixed, out


def as_on_cuda(host: EagerDecoder) -> tuple[DeviceDecoder, str, None]:
    return DeviceDecoder(host, is_compiled=False, is_captured=True), "graph", None


def test_auto_captures_from_the_second_call_on_where_the_first_would_not_make_up_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_steps, "capture_graph", captured)
    monkeypatch.setattr(step_pool, "choose_steps", as_on_cuda)
    monkeypatch.setattr(step_pool, "resolve_form", lambda compiled, _: ("graph" if compiled else "eager", None))
    model = build_model(transformer("latent"), seed=0).double()
    few, many = step_pool.FEWEST_FORWARDS, step_pool.FEWEST_FORWARDS + 1
    wanted = Generator(model, compiled=False, temperature=0.0, max_new_tokens=few).generate([[1, 2]])
    short = Generator(model, temperature=0.0, max_new_tokens=few)
    reason = f"a first call of {few - 1} steps is over sooner than with a capture"
    for ran in (("eager", reason, 0), ("graph", None, 1), ("graph", None, 0)):
        assert short.generate([[1, 2]])[0].tokens == wanted[0].tokens
        assert (short.stats.decode, short.stats.not_compiled, short.stats.captures) == ran
    longer: tuple[tuple[dict[str, Any], list[list[int]]], ...] = (
        ({"max_new_tokens": many}, [[1, 2]]),
        ({"max_new_tokens": few}, [[1, 2], [1, 2, 3]]),  # the shorter row waits for one more step
        ({"max_new_tokens": 2, "compiled": "graph"}, [[1, 2]]),
    )
    for values, prompts in longer:
        stepped = Generator(model, temperature=0.0, **values)
        stepped.generate(prompts)
        assert (stepped.stats.decode, stepped.stats.not_compiled, stepped.stats.captures) == (
            "graph",
            None,
            1,
        )
    packed = Generator(model, temperature=0.0, max_new_tokens=few, cache_kind=KVCacheKind.MIXED)
    for _ in range(2):  # so few tokens of a quantised cache are kept for no later call
        packed.generate([[1, 2]])
        assert (packed.stats.decode, packed.stats.not_compiled) == ("eager", reason)


def test_auto_takes_no_more_room_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "capture_graph", captured)
    monkeypatch.setattr(step_pool, "choose_steps", as_on_cuda)
    monkeypatch.setattr(step_pool, "resolve_form", lambda compiled, _: ("graph", None))
    model = build_model(transformer("latent"), seed=0).double()
    inner = model.new_context

    def small(batch_size: int, max_tokens: int, *given: Any, **more: Any) -> Any:
        if max_tokens > 512:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return inner(batch_size, max_tokens, *given, **more)

    monkeypatch.setattr(model, "new_context", small)
    values: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0}
    generator = Generator(model, **values)
    generator.generate([[1] * 480])
    assert (generator.stats.decode, len(generator.pool._kept)) == ("graph", 1)
    monkeypatch.setattr(step_pool, "step_capacity", lambda n, _: 2 * n)
    generator.generate([[2] * 481])
    reason = "a cache of 1002 tokens, which it takes to keep a graph, does not fit"
    assert (generator.stats.decode, generator.stats.not_compiled) == ("eager", reason)
    assert not generator.pool._kept, "their memory is free"
    with pytest.raises(torch.OutOfMemoryError):
        generator.generate([[1] * 600])  # nor does what it takes at least
    with pytest.raises(torch.OutOfMemoryError):
        Generator(model, compiled="graph", **values).generate([[2] * 481])


def test_auto_gives_up_what_it_kept_for_a_cache_that_fits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "capture_graph", captured)
    monkeypatch.setattr(step_pool, "choose_steps", as_on_cuda)
    monkeypatch.setattr(step_pool, "resolve_form", lambda compiled, _: ("graph", None))
    model = build_model(transformer("latent"), seed=0).double()
    inner, held = model.new_context, list[tuple[weakref.ref[Any], int]]()

    def small(batch_size: int, max_tokens: int, *given: Any, **more: Any) -> Any:
        gc.collect()
        if max_tokens + sum(n for context, n in held if context() is not None) > 1200:
            raise torch.OutOfMemoryError("CUDA out of memory")
        made = inner(batch_size, max_tokens, *given, **more)
        held.append((weakref.ref(made), max_tokens))
        return made

    monkeypatch.setattr(model, "new_context", small)
    for form in ("auto", "graph"):
        generator = Generator(model, max_new_tokens=20, temperature=0.0, compiled=form)
        for n_tokens in (100, 600, 100):
            generator.generate([[1] * n_tokens])
            assert (generator.stats.decode, generator.stats.captures) == ("graph", 1)
        del generator


def test_auto_keeps_to_the_budget_of_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "capture_graph", captured)
    monkeypatch.setattr(step_pool, "choose_steps", as_on_cuda)
    monkeypatch.setattr(step_pool, "resolve_form", lambda compiled, _: ("graph", None))
    model = build_model(transformer("latent"), seed=0)
    budget = cache_bytes(model, 1, 620, KVCacheKind.BF16) / 1e6
    for form in ("auto", "graph"):
        generator = Generator(
            model,
            max_new_tokens=20,
            temperature=0.0,
            compiled=form,
            cache_kind="auto",
            cache_budget_mb=budget,
        )
        generator.generate([[1] * 600])
        stats, reason = generator.stats, "a cache of 1024 tokens, which it takes to keep a graph, is over"
        assert (stats.cache_bytes <= budget * 1e6) == (form == "auto")
        assert (stats.decode, (stats.not_compiled or "").startswith(reason)) == (
            ("eager", True) if form == "auto" else ("graph", False)
        )


@pytest.mark.parametrize("read_every", [1, 5])
def test_a_captured_step_draws_and_feeds_itself(monkeypatch: pytest.MonkeyPatch, read_every: int) -> None:
    """As on a CUDA device, here without a graph: rows that wait for others have a graph of their own."""
    drawn: list[bool] = []
    choose = StepState.choose

    def counted(self: StepState, *given: Any) -> Tensor:
        drawn.append(self.is_level)
        return choose(self, *given)

    monkeypatch.setattr(device_steps, "capture_graph", captured)
    monkeypatch.setattr(step_pool, "choose_steps", as_on_cuda)
    model = build_model(transformer("latent"), seed=0).double()
    options: dict[str, Any] = {"max_new_tokens": 7, "temperature": 1.2, "repetition_penalty": 1.3}
    options |= {"read_every": read_every, "eos_token_id": 3}
    level, ragged = [[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
    stepped = Generator(model, compiled=True, **options)
    for prompts, n_graphs in ((level, 1), (level[::-1], 0), (ragged[:2], 1), (ragged[:0:-1], 0), (level, 0)):
        wanted = Generator(model, **options).generate(prompts)
        with monkeypatch.context() as patched:
            patched.setattr(StepState, "choose", counted)
            found = stepped.generate(prompts)
        assert [(row.tokens, row.finish) for row in found] == [(row.tokens, row.finish) for row in wanted]
        assert [row.logprobs for row in found] == [pytest.approx(row.logprobs) for row in wanted]
        assert stepped.stats.captures == n_graphs
        # One draw a forward and that of the prompt, none by the host besides.
        assert len(drawn) == stepped.stats.steps + 1 + device_steps.WARM_UPS * n_graphs
        assert set(drawn) == {len({len(prompt) for prompt in prompts}) == 1}
        drawn.clear()
