"""Whole prompts packed in forwards of fixed sizes: which sizes there are, and that a text is what it would be alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba.config.kvcache import KVCacheKind
from caramba.infer import generate
from caramba.infer.device_steps import WARM_UPS
from caramba.infer.engine import Engine, Ticket, batch, prompts
from caramba.infer.engine import slots as slots_module
from caramba.infer.engine.prompts import PromptForwards, sizes_of
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


def submit_all(engine: Engine) -> list[Ticket]:
    return [
        engine.submit(text, seed=7 + index, max_new_tokens=3 + index % 4, temperature=0.7)
        for index, text in enumerate(TEXTS)
    ]


def alone(model: Model, **settings: Any) -> list[tuple[int, ...]]:
    return [
        generate(model, [text], seeds=[7 + index], max_new_tokens=3 + index % 4, temperature=0.7, **settings)[
            0
        ].tokens
        for index, text in enumerate(TEXTS)
    ]


def stand_for_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a graph be the function that it would hold, run as often before as a capture runs it."""

    def captured(given: torch.Tensor, run: Any, trial: Any, *rest: Any) -> Any:
        for _ in range(WARM_UPS):
            trial(given.clone())
        run(given.clone())
        return run, given.clone(), None

    def replayed(graph: Any, given: torch.Tensor) -> torch.Tensor:
        graph[1].copy_(given)
        return graph[0](graph[1])

    monkeypatch.setattr(prompts, "captured", captured)
    monkeypatch.setattr(prompts, "replayed", replayed)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


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
    monkeypatch.setattr(batch, "PATIENCE", 0)
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

    def submit(n_tokens: int, n_new: int, seed: int) -> Ticket:
        return engine.submit(TEXTS[1][:n_tokens], max_new_tokens=n_new, seed=seed, temperature=0.7)

    first, other = submit(8, 20, 1), submit(5, 3, 2)
    engine.step()  # nothing decodes, so that there is nothing to run beside
    assert slots.is_decoding == [True, True]
    waiting, last = submit(9, 2, 3), submit(4, 2, 4)
    for _ in range(3):
        engine.step()
    assert (len(other.tokens), engine.stats().active, engine.stats().queued) == (3, 2, 1)
    for _ in range(batch.PATIENCE):  # few tokens, and another request queues up: its slot may come free soon
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
def test_prompts_that_take_long_run_beside_several_steps(
    n_until_done: int, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    n_beside = min(n_until_done + 1, batch.BESIDE)
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


def test_layers_of_equal_frequencies_share_the_angles_of_packed_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = sharp(transformer("gqa_scaled", repeat=3))
    made: list[object] = []
    make = RotaryEmbedding._made
    monkeypatch.setattr(RotaryEmbedding, "_made", lambda *given: made.append(given[1]) or make(*given))
    ctx = model.new_context(2, 48, KVCacheKind.FP32, static=True)
    for texts in (TEXTS[:2], TEXTS[2:4]):
        made.clear()
        given = torch.tensor(prompts.packed([0, 1], texts, sum(map(len, texts)), 2))
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
    capture, made = prompts.captured, list[int]()

    def captured(*given: Any) -> Any:
        made.append(len(given))
        if len(made) == 2:
            raise torch.OutOfMemoryError("no room for a graph")
        return capture(*given)

    monkeypatch.setattr(prompts, "captured", captured)
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
