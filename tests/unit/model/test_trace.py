"""Trace: what is recorded, in which order, and that hooks never stay."""

from __future__ import annotations

import pytest
import torch
from model_specs import attention, spec

from caramba.errors import ConfigError
from caramba.layer import AttentionLayer
from caramba.model import Model, Trace, build_model

TOKENS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def model() -> Model:
    return build_model(
        spec(
            attention("standard"),
            {"type": "CyclicTopology", "layers": [attention("decoupled")], "n_cycles": 2},
        ),
        seed=0,
    )


def is_attention(name: str, module: torch.nn.Module) -> bool:
    return isinstance(module, AttentionLayer)


def hooks_of(model: Model) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_records_calls_in_execution_order(model: Model) -> None:
    with Trace(model, is_attention, keep_inputs=True) as trace:
        model(TOKENS)
    cyclic = "topology.layers.1.layers.0"
    assert [record.name for record in trace.records] == ["topology.layers.0", cyclic, cyclic]
    torch.testing.assert_close(trace.inputs[0], model.embedder(TOKENS))
    for source, output, following in zip(trace.inputs, trace.outputs, trace.inputs[1:], strict=False):
        assert source.shape == output.shape == (1, 3, 16)
        assert torch.equal(output, following)
    assert trace.last(cyclic) is trace.outputs[-1]
    assert not any(output.requires_grad for output in trace.outputs)
    assert hooks_of(model) == 0
    trace.clear()
    assert trace.outputs == []


def test_without_detach_gradients_flow(model: Model) -> None:
    with Trace(model, lambda name, module: name == "topology.layers.0", detach=False) as trace:
        model(TOKENS)
    trace.last("topology.layers.0").sum().backward()
    assert model.embedder.token.weight.grad is not None
    assert trace.inputs == []


def test_hooks_go_even_when_the_forward_fails(model: Model) -> None:
    trace = Trace(model, is_attention)

    def fail() -> None:
        with trace:
            assert hooks_of(model) == 2
            model(TOKENS[0])

    with pytest.raises(ConfigError):
        fail()
    assert hooks_of(model) == 0


def test_nested_outputs_and_misuse(model: Model) -> None:
    with Trace(model, lambda name, module: name.endswith("projection")) as trace:
        model(TOKENS)
    q, streams = trace.last("topology.layers.0.projection")
    assert not q.requires_grad
    assert not streams["k"].requires_grad
    with (
        pytest.raises(ConfigError, match=r"accepts none of the \d+ modules of Model"),
        Trace(model, lambda name, module: False),
    ):
        pass
    with pytest.raises(ConfigError, match=r"no output of 'head'; .* traced: topology.layers.0.projection"):
        trace.last("head")
