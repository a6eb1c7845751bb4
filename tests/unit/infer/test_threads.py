"""Small decode steps on a CPU run in one thread, whatever comes of them."""

from __future__ import annotations

import pytest
import torch

from caramba.infer import Generator, device_steps
from caramba.infer.device_steps import step_threads
from caramba.infer.engine import Engine
from caramba.infer.step import StepState
from caramba.model import Model, build_model
from tests.unit.model.model_specs import transformer


@pytest.fixture
def model() -> Model:
    return build_model(transformer("gqa_scaled"), seed=0).eval()


@pytest.fixture(autouse=True)
def two_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_steps_of_a_small_model_take_one_thread_and_leave_the_others(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(StepState, "read", lambda *given: seen.append(torch.get_num_threads()) or len(seen) == 2)
    generator = Generator(model, max_new_tokens=40, temperature=0.0, eos_token_id=[])
    generator.generate([[1, 2]])
    assert (seen, torch.get_num_threads()) == ([1, 1], 2)
    with pytest.raises(KeyError), step_threads(model, 1):
        raise KeyError
    assert torch.get_num_threads() == 2


def test_steps_that_are_worth_it_are_shared_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "WORTH_THREADS", 1)
    with step_threads(model, 1):
        assert torch.get_num_threads() == 2


def test_no_step_counts_the_weights_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model, n_slots=2, max_len=16)
    seen: list[int] = []
    ticket = engine.submit(
        [1, 2], max_new_tokens=4, temperature=0, on_event=lambda _: seen.append(torch.get_num_threads())
    )
    elsewhere = build_model(transformer("gqa_scaled"), seed=0).to("meta")

    def refuse(self: Model, recurse: bool = True) -> object:
        raise AssertionError("the weights are walked")

    monkeypatch.setattr(Model, "parameters", refuse)
    while engine.step():
        pass
    assert len(ticket.row.tokens) == 4
    with step_threads(elsewhere, 1):
        assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    with step_threads(model, 1):
        assert torch.get_num_threads() == 1
