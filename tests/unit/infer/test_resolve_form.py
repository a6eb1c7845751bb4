"""How steps are asked to run: what `auto` is on a device, and what people are told of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba.config.generate import Compiled, EngineConfig, GenerateConfig
from caramba.data import ByteTokenizer
from caramba.infer import Generator, SpeculativeGenerator, device_steps, speculative
from caramba.infer.chat_session import ChatSession, steps_remark
from caramba.infer.device_steps import resolve_form
from caramba.infer.dialogue import Dialogue
from caramba.infer.engine import Engine
from caramba.infer.generator import GenerateStats
from caramba.model import build_model
from tests.unit.infer.test_generator import byte_spec, sharp
from tests.unit.model.model_specs import transformer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
NO_CUDA = "CUDA graphs need a CUDA device, the model is on cpu"


@pytest.mark.parametrize(
    ("compiled", "on_cpu", "on_cuda"),
    [
        (False, ("eager", None), ("eager", None)),
        ("auto", ("eager", None), ("graph", None)),
        ("graph", ("eager", NO_CUDA), ("graph", None)),
        (True, ("compiled", None), ("compiled graph", None)),
    ],
)
def test_the_form_is_that_of_the_word_on_the_device(compiled: Compiled, on_cpu: Any, on_cuda: Any) -> None:
    assert resolve_form(compiled, CPU) == on_cpu
    assert resolve_form(compiled, CUDA) == on_cuda
    assert resolve_form(compiled, torch.device("mps"))[0] == on_cpu[0]


def test_auto_captures_nothing_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "is_distributed", lambda: True)
    monkeypatch.setattr(device_steps, "get_world_size", lambda: 2)
    reason = "2 ranks take part, and auto captures the steps of one alone"
    assert resolve_form("auto", CUDA) == ("eager", reason)
    assert resolve_form("auto", CPU) == ("eager", None)
    assert resolve_form("graph", CUDA) == ("graph", None)
    assert resolve_form(True, CUDA) == ("compiled graph", None)


def test_without_a_word_steps_run_as_auto_says(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sharp(transformer("gqa_scaled"))
    values: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.0}
    for generator in (Generator(model, **values), SpeculativeGenerator(model, **values)):
        assert generator.config.compiled == "auto"
        generator.generate([[1, 2, 3]])
        assert (generator.stats.decode, generator.stats.not_compiled) == ("eager", None)
    refused = ("eager", "not here")
    monkeypatch.setattr(device_steps, "resolve_form", lambda *_: refused)
    monkeypatch.setattr(speculative, "resolve_form", lambda *_: refused)
    for generator in (Generator(model, **values), SpeculativeGenerator(model, **values)):
        generator.generate([[1, 2, 3]])
        assert (generator.stats.decode, generator.stats.not_compiled) == refused


def test_an_engine_takes_auto_too() -> None:
    assert EngineConfig().compiled == "graph"
    engine = Engine(build_model(transformer("gqa_scaled"), seed=0), n_slots=1, max_len=16, compiled="auto")
    assert (engine.stats().decode, engine.stats().not_compiled) == ("eager", None)


def test_what_is_said_of_steps() -> None:
    eager, refused = GenerateStats(), GenerateStats(not_compiled="heads are wide")
    auto, graph, off = (GenerateConfig(compiled=word) for word in ("auto", "graph", False))
    assert steps_remark(refused, auto, CUDA) == "steps were not captured: heads are wide"
    assert steps_remark(refused, graph, CUDA) == "compiled=graph was not followed: heads are wide"
    assert "--compiled graph captures them" in (steps_remark(eager, off, CUDA) or "")
    assert steps_remark(GenerateStats(decode="graph"), auto, CUDA) is None
    assert steps_remark(eager, auto, CPU) is steps_remark(eager, off, CPU) is None


def test_a_conversation_tells_how_its_steps_ran() -> None:
    tokenizer = ByteTokenizer()
    generator = Generator(sharp(byte_spec()), tokenizer, max_new_tokens=2, max_seq_len=60)
    talk = ChatSession(generator, Dialogue(tokenizer, None, None))
    talk.say("hi")
    assert talk.stats().endswith("of 60 tokens, eager steps")
    generator.stats.not_compiled = "heads are wide"
    assert talk.stats().endswith("eager steps (heads are wide)")
