"""Whole prompts packed in forwards of fixed sizes: which sizes there are, and that a text is what it would be alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from caramba.config.kvcache import KVCacheKind
from caramba.infer import generate
from caramba.infer.device_steps import WARM_UPS
from caramba.infer.engine import Engine, RequestHandle, batch, prompts
from caramba.infer.engine import slots as slots_module
from caramba.infer.engine.prompts import ChunkedGraph, PromptForwards, sizes_of
from caramba.layer import RotaryEmbedding
from caramba.model import Model
from tests.unit.infer.engine.test_engine import run
from tests.unit.infer.test_generator import sharp
from tests.unit.model.model_specs import transformer

LENGTHS = (3, 13, 5, 30, 2, 9, 16, 1, 40)
TEXTS = [[(3 * index + at) % 23 for at in range(n)] for index, n in enumerate(LENGTHS)]


def test_sizes_are_multiples_of_a_grain_and_then_quarters() -> None:
    assert sizes_of(512, 1024) == [64, 128, 192, 256, 320, 384, 448, 512]
    assert sizes_of(256, 1024) == sizes_of(512, 1024), "one prompt of up to 512 runs whole"
    assert sizes_of(1100, 1024)[7:] == [512, 640, 768, 896, 1024, 1100]
    assert sizes_of(16, 32) == [16, 32]
    assert sizes_of(1 << 20, 1 << 20)[-5:] == [1024, 1280, 1536, 1792, prompts.MOST]
    assert sizes_of(1 << 20, 1 << 20, limit=300) == [64, 128, 192, 256, 300]


def submit_all(engine: Engine) -> list[RequestHandle]:
    return [
        engine.submit(text, seed=7 + index, max_new_tokens=3 + index % 4, temperature=0.7)
        for index, text in enumerate(TEXTS)
    ]


def alone(model: Model, **settings: Any) -> list[tuple[int, ...]]:
    return [
        generate(model, [text], seeds=[7 + index], max_new_tokens=3 + index % 4, temperature=0.7, **settings)[0].tokens
        for index, text in enumerate(TEXTS)
    ]


def stand_for_graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let graphs be the function that they would hold, run as often before as a capture runs it, of which the last
    piece does all; return the number of pieces that each replay was one of."""
    replays: list[int] = []

    class Graph:
        def __init__(self, n_pieces: int, does: Callable[[], object]) -> None:
            self.n_pieces, self.does = n_pieces, does

        def replay(self) -> None:
            replays.append(self.n_pieces)
            self.does()

    def captured(given: torch.Tensor, run: Any, _places: Any, n_pieces: int, *_rest: Any) -> Any:
        for _ in range(WARM_UPS):
            run(given.clone())
        own = given.clone()
        out = run(own)
        rest = [Graph(n_pieces, lambda: None)] * (n_pieces - 1)
        return ChunkedGraph([*rest, Graph(n_pieces, lambda: out.copy_(run(own)))], own, out)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(prompts, "capture_in_chunks", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return replays


WIDE = [24, 32, 8, 16, 16, 8]
NARROW = [16, 8, 32, 8, 16, 16, 8, 40]


@pytest.mark.parametrize(
    ("name", "chunk", "wanted"),
    # The longest prompt: beyond a chunk of 32 in parts as they are, and whole where 48 tokens are no part to launch.
    [("gqa_scaled", 32, [*WIDE, 32, 8]), ("latent_gate", 16, NARROW)],
)
def test_packed_prompts_give_what_each_gives_alone(
    name: str, chunk: int, wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, whole in ((prompts, "WHOLE"), (slots_module, "WHOLE")):
        monkeypatch.setattr(module, whole, 32 if chunk == 32 else 512)
    monkeypatch.setattr(batch, "MAX_PREFILL_DELAY_STEPS", 0)
    monkeypatch.setattr(prompts, "GRAIN", 8)
    monkeypatch.setattr(prompts, "SHORTEST", 4)
    monkeypatch.setattr(prompts, "USUAL", 12)
    model = sharp(transformer(name, repeat=1))
    engine = Engine(model, n_slots=4, max_len=48, prefill_chunk=chunk)
    slots = engine.batch.slots
    sizes = sizes_of(chunk, 48)
    # What a CUDA device captures, here without a graph.
    is_captured = chunk == 16
    if is_captured:
        stand_for_graphs(monkeypatch)
    slots.prompts = PromptForwards(model, slots.ctx, sizes, is_captured=is_captured)
    tickets = submit_all(engine)
    ran: list[tuple[int, ...]] = []
    handle = model.embedder.register_forward_hook(lambda _, given, out: ran.append(tuple(given[0].shape)))
    run(engine)
    handle.remove()
    assert [ticket.tokens for ticket in tickets] == alone(model)
    # All graphs are made before the first prompt runs, none later.
    n_made = WARM_UPS + 1 if is_captured else 0
    n_forms = {size: len(slots.prompts.counts(size)) for size in sizes}
    made = [size for size in reversed(sizes) for _ in range(n_made * n_forms[size])]
    found = [shape[1] for shape in ran if shape[1] > 1]
    assert found == [*made, *wanted]
    assert slots.prompts.captures == (sum(n_forms.values()) if is_captured else 0)
    stats = engine.stats()
    assert (stats.finished, stats.failed, stats.prefilled_tokens) == (9, 0, sum(LENGTHS))
    assert stats.cache_bytes == slots.ctx.nbytes()


def test_prompts_run_beside_a_step_and_wait_for_others_while_requests_queue_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_for_graphs(monkeypatch)
    model = sharp(transformer("gqa_scaled", repeat=1))
    engine = Engine(model, n_slots=2, max_len=48, prefill_chunk=32)
    slots = engine.batch.slots
    slots.prompts = PromptForwards(model, slots.ctx, sizes_of(32, 48), is_captured=True)

    def submit(n_tokens: int, n_new: int, seed: int) -> RequestHandle:
        return engine.submit(TEXTS[1][:n_tokens], max_new_tokens=n_new, seed=seed, temperature=0.7)

    first, other = submit(8, 20, 1), submit(5, 3, 2)
    engine.step()  # nothing decodes, so that there is nothing to run beside
    assert slots.is_decoding == [True, True]
    waiting, last = submit(9, 2, 3), submit(4, 2, 4)
    for _ in range(3):
        engine.step()
    assert (len(other.tokens), engine.stats().active, engine.stats().queued) == (3, 2, 1)
    for _ in range(
        batch.MAX_PREFILL_DELAY_STEPS
    ):  # few tokens, and another request queues up: its slot may come free soon
        assert slots.lengths[1] == 0
        engine.step()
    assert (slots.lengths[1], slots.is_decoding[1], waiting.tokens) == (9, False, ())
    engine.step()  # beside this one the prompt has run
    assert (slots.is_decoding[1], waiting.tokens) == (True, ())
    run(engine)
    for ticket, n_tokens, seed in ((first, 8, 1), (other, 5, 2), (waiting, 9, 3), (last, 4, 4)):
        n_new, prompt = len(ticket.tokens), TEXTS[1][:n_tokens]
        (wanted,) = generate(model, [prompt], seeds=[seed], max_new_tokens=n_new, temperature=0.7)
        assert ticket.tokens == wanted.tokens
    # Cancelled while its prompt runs, a request leaves nothing behind, and its slot serves the next one.
    long, gone = submit(8, 20, 1), submit(9, 9, 3)
    engine.step()
    gone.cancel()
    engine.step()
    gone = submit(9, 9, 3)
    engine.step()
    assert (slots.lengths[1], slots.is_decoding[1]) == (9, False)
    gone.cancel()
    late = submit(4, 2, 4)
    run(engine)
    assert (long.tokens[:20], late.tokens, gone.tokens) == (first.tokens, last.tokens, ())


@pytest.mark.parametrize("n_until_done", [0, 2, 99])
def test_prompts_that_take_long_run_beside_several_steps(n_until_done: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_for_graphs(monkeypatch)
    asked: list[bool] = []

    def is_done(_: PromptForwards) -> bool:
        asked.append(len(asked) % (n_until_done + 1) == n_until_done)
        return asked[-1]

    monkeypatch.setattr(PromptForwards, "is_done", property(is_done))
    model = sharp(transformer("gqa_scaled", repeat=1))
    engine = Engine(model, n_slots=3, max_len=48, prefill_chunk=32)
    slots = engine.batch.slots
    slots.prompts = PromptForwards(model, slots.ctx, sizes_of(32, 48), is_captured=True)
    first = engine.submit(TEXTS[0], max_new_tokens=20, seed=1, temperature=0.7)
    engine.step()
    assert slots.is_decoding[0], "nothing decodes that it could run beside"
    second = engine.submit(TEXTS[1], max_new_tokens=4, seed=2, temperature=0.7)
    engine.step()
    third = engine.submit(TEXTS[2], max_new_tokens=4, seed=3, temperature=0.7)
    n_beside = min(n_until_done + 1, batch.MAX_OVERLAP_STEPS)
    for n in range(n_beside):
        assert (slots.is_decoding, slots.lengths[1:]) == ([True, False, False], [len(TEXTS[1]), 0])
        assert len(first.tokens) == 1 + n
        engine.step()
    # From then on it decodes, and the next prompt runs.
    assert (slots.is_decoding, slots.lengths[2]) == ([True, True, False], len(TEXTS[2]))
    run(engine)
    for index, ticket in enumerate((first, second, third)):
        n_new = len(ticket.tokens)
        (wanted,) = generate(model, [TEXTS[index]], seeds=[1 + index], max_new_tokens=n_new, temperature=0.7)
        assert (ticket.tokens, n_new) == (wanted.tokens, 4 if index else 20)


def engine_ahead(monkeypatch: pytest.MonkeyPatch, n_slots: int, n_ahead: int, chunk: int = 32) -> Engine:
    """Return an engine of rows ahead as on a CUDA device."""
    stand_for_graphs(monkeypatch)
    monkeypatch.setattr(slots_module.Slots, "_ahead_refusal", lambda *_: None)
    model = sharp(transformer("gqa_scaled", repeat=1))
    engine = Engine(model, n_slots=n_slots, n_ahead=n_ahead, max_len=48, prefill_chunk=chunk)
    slots = engine.batch.slots
    slots.prompts = PromptForwards(model, slots.ctx, sizes_of(chunk, 48), is_captured=True)
    return engine


@pytest.mark.parametrize(("n_slots", "n_ahead"), [(1, 1), (2, 3), (3, 1)])
def test_prompts_that_run_ahead_of_a_slot_give_what_each_gives_alone(
    n_slots: int, n_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_ahead(monkeypatch, n_slots, n_ahead)
    slots, most, moved = engine.batch.slots, 0, list[tuple[int, int]]()
    move = slots.move
    monkeypatch.setattr(slots, "move", lambda row, slot: moved.append((row, slot)) or move(row, slot))
    tickets = submit_all(engine)
    while engine.step():
        stats = engine.stats()
        assert (stats.active <= n_slots, stats.ahead <= stats.n_ahead) == (True, True)
        most = max(most, stats.active + stats.ahead)
        assert not any(slots.is_decoding[n_slots:])
    assert [ticket.tokens for ticket in tickets] == alone(engine.model)
    assert most == n_slots + n_ahead
    assert {row for row, _ in moved} == set(range(n_slots, n_slots + n_ahead))
    assert {slot for _, slot in moved} <= set(range(n_slots))
    # What has left, or moved, is overwritten.
    assert not any(part.any() for cache in slots.ctx.caches for part in cache.memory)
    assert (engine.stats().finished, engine.stats().failed) == (len(TEXTS), 0)
    assert engine.batch.requests == [None] * (n_slots + n_ahead)


def test_a_slot_that_gets_free_decodes_what_has_run_ahead_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_ahead(monkeypatch, 1, 1)
    slots = engine.batch.slots
    first, second, third = (engine.submit(TEXTS[1][:n], max_new_tokens=4, seed=n) for n in (8, 5, 3))
    engine.step()  # the first prompt runs
    seen = []
    while engine.step():
        seen.append((len(first.tokens), len(second.tokens), len(third.tokens)))
        assert slots.is_decoding[0] or not engine.batch.n_active
    drawn = [(n, 0, 0) for n in range(1, 5)] + [(4, n, 0) for n in range(1, 5)] + [(4, 4, n) for n in range(1, 4)]
    assert seen == drawn, "a token in every step, of one request or the next"


def test_requests_ahead_of_a_slot_are_cancelled_and_ended_at_any_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Steps until the cancelled request waits ahead for others to run with, runs beside a step, has run.
    for n_steps in range(1, 8):
        engine = engine_ahead(monkeypatch, 1, 2)
        first = engine.submit(TEXTS[1][:8], max_new_tokens=12, seed=1, temperature=0.7)
        gone, late = (engine.submit(TEXTS[1][:n], max_new_tokens=3, seed=n, temperature=0.7) for n in (9, 5))
        for _ in range(n_steps):
            engine.step()
        gone.cancel()
        run(engine)
        assert (len(first.tokens), gone.tokens, len(late.tokens)) == (12, (), 3)
        for ticket, n_tokens, seed in ((first, 8, 1), (late, 5, 5)):
            (wanted,) = generate(
                engine.model,
                [TEXTS[1][:n_tokens]],
                seeds=[seed],
                max_new_tokens=len(ticket.tokens),
                temperature=0.7,
            )
            assert ticket.tokens == wanted.tokens
        assert not any(part.any() for cache in engine.batch.slots.ctx.caches for part in cache.memory)
        engine = engine_ahead(monkeypatch, 1, 2)
        tickets = submit_all(engine)
        for _ in range(n_steps):
            engine.step()
        engine.close()
        assert all(ticket.finish_reason in ("cancelled", "length") for ticket in tickets)
        assert engine.batch.n_active == 0


def test_rows_ahead_are_for_captured_prompts_of_exact_caches_alone() -> None:
    model = sharp(transformer("gqa_scaled", repeat=1))
    engine = Engine(model, n_slots=2, n_ahead=3, max_len=48)
    assert (engine.batch.slots.n_ahead, len(engine.batch.slots.rows)) == (0, 2), "nothing is captured on a CPU"
    tickets = submit_all(engine)
    run(engine)
    assert [ticket.tokens for ticket in tickets] == alone(model)


def test_layers_of_equal_frequencies_share_the_angles_of_packed_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sharp(transformer("gqa_scaled", repeat=3))
    made: list[object] = []
    make = RotaryEmbedding._compute_cos_sin
    monkeypatch.setattr(RotaryEmbedding, "_compute_cos_sin", lambda *given: made.append(given[1]) or make(*given))
    ctx = model.new_context(2, 48, KVCacheKind.FP32, static=True)
    for texts in (TEXTS[:2], TEXTS[2:4]):
        made.clear()
        given = torch.tensor(prompts.pack_prompts([0, 1], texts, sum(map(len, texts)), 2))
        with torch.inference_mode():
            found = prompts.fill_slots(model, ctx, given, 2)
            n_made = len(made)
            for row, text in zip(found, texts, strict=True):
                alone = model(torch.tensor([text]))[0, -1]
                torch.testing.assert_close(row, alone, rtol=1e-4, atol=1e-4)
        assert n_made == 1


def test_a_capture_that_fails_leaves_the_prompts_to_run_as_they_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_for_graphs(monkeypatch)
    capture, made = prompts.capture_in_chunks, list[int]()

    def captured(*given: Any) -> Any:
        made.append(len(given))
        if len(made) == 2:
            raise torch.OutOfMemoryError("no room for a graph")
        return capture(*given)

    monkeypatch.setattr(prompts, "capture_in_chunks", captured)
    monkeypatch.setattr(prompts, "GRAIN", 16)
    model = sharp(transformer("gqa_scaled", repeat=1))
    engine = Engine(model, n_slots=4, max_len=48, prefill_chunk=32)
    slots = engine.batch.slots
    sizes = sizes_of(32, 48)
    slots.prompts = PromptForwards(model, slots.ctx, sizes, is_captured=True)
    tickets = submit_all(engine)
    run(engine)
    assert [ticket.tokens for ticket in tickets] == alone(model)
    assert (len(made), slots.prompts, engine.stats().failed) == (2, None, 0)
    said = " ".join("".join(capsys.readouterr()).split())
    assert said.count("prompts run without: no room for a graph") == 1
