"""Captured forwards of packed prompts on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from caramba.infer.engine import Engine, prompts
from caramba.model import build_model
from tests.unit.infer.engine.test_engine import run
from tests.unit.infer.engine.test_prompts import alone, submit_all
from tests.unit.model.model_specs import transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("n_ahead", [0, 2])
@pytest.mark.parametrize("name", ["gqa_scaled", "decoupled_gate", "latent_gate"])
def test_captured_prompts_give_the_text_of_the_cpu(name: str, n_ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "GRAIN", 16)
    monkeypatch.setattr(prompts, "PIECE", 32)  # larger forwards are of two pieces
    model = build_model(transformer(name), seed=0)
    wanted = alone(model)
    model = model.cuda()
    for compiled in (False, "graph"):
        engine = Engine(model, n_slots=4, n_ahead=n_ahead, max_len=48, prefill_chunk=64, compiled=compiled)
        assert engine.stats().n_ahead == (n_ahead if compiled else 0)
        forwards = engine.batch.slots.prompts
        assert (forwards is not None) == (compiled == "graph")
        captures = list[int]()
        for _ in range(3):
            tickets = submit_all(engine)
            run(engine)
            assert [ticket.tokens for ticket in tickets] == wanted
            captures.append(0 if forwards is None else forwards.captures)
        assert captures == ([7, 7, 7] if compiled else [0, 0, 0])
        if forwards is not None:
            assert {len(pieces.graphs) for pieces in forwards._graphs.values()} == {1, 2}
        assert engine.stats().failed == 0
    # Tables of angles that a longer context makes do not take those away that the graphs read.
    model.new_context(1, 4096)
    spoilt = [torch.full((2**at,), torch.nan, device="cuda") for at in range(4, 16)]
    tickets = submit_all(engine)
    run(engine)
    assert [ticket.tokens for ticket in tickets] == wanted
    assert len(spoilt) == 12
    # In its thread the engine lays weights side by side, and prompts run on joined products.
    with Engine(model, n_slots=4, n_ahead=n_ahead, max_len=48, prefill_chunk=64, compiled="graph") as threaded:
        for _ in range(2):
            tickets = submit_all(threaded)
            for ticket in tickets:
                ticket.wait()
            assert [ticket.tokens for ticket in tickets] == wanted
        assert threaded.batch.slots.prompts is not None
        assert threaded.batch.slots.prompts.captures == 7


def test_a_capture_without_memory_leaves_the_prompts_to_run_as_they_come_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prompts, "GRAIN", 16)
    model = build_model(transformer("gqa_scaled"), seed=0)
    wanted = alone(model)
    model = model.cuda()
    engine = Engine(model, n_slots=4, max_len=48, prefill_chunk=64, compiled="graph")
    slots = engine.batch.slots
    forwards, stream = slots.prompts, torch.cuda.current_stream()
    assert forwards is not None

    def exhaust(*_: object) -> None:
        if torch.cuda.is_current_stream_capturing() and forwards.captures == 1:
            torch.empty(1 << 50, device="cuda")

    handle = model.embedder.register_forward_hook(exhaust)
    tickets = submit_all(engine)
    engine.step()
    handle.remove()
    assert (slots.prompts, forwards.captures, torch.cuda.current_stream()) == (None, 1, stream)
    run(engine)
    assert [ticket.tokens for ticket in tickets] == wanted
    assert "".join(capsys.readouterr()).count("cannot be captured") == 1
