"""Forwards over prompts in several graphs: one beside each decode step, all at once where more wait than decode."""

from __future__ import annotations

import pytest
import torch

from caramba.infer import generate
from caramba.infer.engine import Engine, prompts
from caramba.infer.engine.prompts import PromptForwards, cut_calls, sizes_of
from caramba.infer.step_pool import addresses
from tests.unit.infer.engine.test_engine import run
from tests.unit.infer.engine.test_prompts import TEXTS, stand_for_graphs
from tests.unit.infer.test_generator import sharp
from tests.unit.model.model_specs import transformer


def engine_of_pieces(monkeypatch: pytest.MonkeyPatch, n_slots: int) -> tuple[Engine, list[int]]:
    """Return an engine whose forwards of 40 tokens are of four pieces, and what is replayed."""
    monkeypatch.setattr(prompts, "PIECE", 12)
    replays = stand_for_graphs(monkeypatch)
    monkeypatch.setattr(prompts, "GRAIN", 8)
    model = sharp(transformer("gqa_scaled", repeat=1))
    engine = Engine(model, n_slots=n_slots, max_len=64, prefill_chunk=40)
    slots = engine.batch.slots
    slots.prompts = PromptForwards(model, slots.ctx, sizes_of(40, 64), is_captured=True)
    return engine, replays


@pytest.mark.parametrize("n_slots", [2, 3])
def test_a_piece_of_a_long_prompt_runs_beside_each_step(n_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, replays = engine_of_pieces(monkeypatch, n_slots)
    slots = engine.batch.slots
    first = engine.submit(TEXTS[0], max_new_tokens=20, seed=1, temperature=0.7)
    engine.step()
    assert (replays, slots.is_decoding[0]) == ([1], True), "8 tokens are one piece"
    long = engine.submit(TEXTS[8], max_new_tokens=4, seed=2, temperature=0.7)
    engine.step()
    engine.submit(TEXTS[2], max_new_tokens=4, seed=3, temperature=0.7)
    # With a slot for what came meanwhile more wait than decode, and no piece waits for another step.
    for n_step, n_launched in enumerate((1, 2, 3, 4) if n_slots == 2 else (1, 4), start=1):
        assert replays == [1, *[4] * n_launched]
        assert (len(first.tokens), slots.is_decoding[1]) == (n_step, False)
        engine.step()
    # Once the last has run the slot decodes, and what came meanwhile runs.
    assert (slots.is_decoding[1], replays[5:]) == (True, [1] if n_slots == 3 else [])
    run(engine)
    (wanted,) = generate(engine.model, [TEXTS[8]], seeds=[2], max_new_tokens=4, temperature=0.7)
    assert long.tokens == wanted.tokens
    # With nobody to wait for, and for who leaves meanwhile, all pieces are launched at once.
    replays.clear()
    alone = engine.submit(TEXTS[8], max_new_tokens=4, seed=2, temperature=0.7)
    engine.step()
    assert (replays, slots.is_decoding.count(True)) == ([4] * 4, 1)
    gone = engine.submit(TEXTS[8], max_new_tokens=4, seed=2, temperature=0.7)
    engine.step()
    assert replays == [4] * 5
    gone.cancel()
    engine.step()
    assert (replays, gone.tokens) == ([4] * 8, ())
    run(engine)
    assert alone.tokens == wanted.tokens


@pytest.mark.parametrize("steps", [0, 2])
def test_prompts_under_way_survive_weights_that_move(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_of_pieces(monkeypatch, 2)
    slots, forwards = engine.batch.slots, engine.batch.slots.prompts
    assert forwards is not None
    engine.submit(TEXTS[0], max_new_tokens=20, seed=1, temperature=0.7)
    engine.step()
    long = engine.submit(TEXTS[8], max_new_tokens=4, seed=2, temperature=0.7)
    for _ in range(1 + steps):
        engine.step()
    assert not slots.is_decoding[1]
    slots._weights = tuple(engine.model.parameters())  # as a device's steps leave them
    slots._places = addresses(slots._weights)
    for parameter in engine.model.parameters():
        parameter.data = parameter.data.clone()
    with torch.inference_mode():
        slots._follow_weights()  # as the next captured step does
    assert (forwards._rest, forwards.is_done, forwards._graphs) == ([], True, {})
    run(engine)
    (wanted,) = generate(engine.model, [TEXTS[8]], seeds=[2], max_new_tokens=4, temperature=0.7)
    assert long.tokens == wanted.tokens


def test_where_more_wait_than_decode_prompts_run_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, replays = engine_of_pieces(monkeypatch, 4)
    model, slots = engine.model, engine.batch.slots
    engine.submit(TEXTS[0], max_new_tokens=20, seed=1, temperature=0.7)
    engine.step()
    texts = (TEXTS[8], TEXTS[8][:39], TEXTS[2])  # the first two do not fit together
    tickets = [engine.submit(text, max_new_tokens=4, seed=2, temperature=0.7) for text in texts]
    engine.step()
    assert (replays, sum(slots.is_decoding)) == ([1, *[4] * 4], 1)
    run(engine)
    for ticket, text in zip(tickets, texts, strict=True):
        (wanted,) = generate(model, [text], seeds=[2], max_new_tokens=4, temperature=0.7)
        assert ticket.tokens == wanted.tokens


def test_pieces_have_like_shares_of_the_calls() -> None:
    assert cut_calls(16, 1) == set()
    assert cut_calls(16, 3) == {5, 11}
    assert cut_calls(16, 4) == {4, 8, 12}
    assert cut_calls(2, 5) == {1}, "no more pieces than calls"
    assert cut_calls(0, 3) == set()
