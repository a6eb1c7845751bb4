"""Trace: what is recorded, in which order, and that hooks never stay."""

from __future__ import annotations

import pytest
import torch
from model_specs import attention, spec
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_records_each_call_once(model: Model, reentrant: bool) -> None:
    x = model.embedder(TOKENS).detach().requires_grad_()
    with Trace(model, is_attention) as plain:
        model.topology(x)
    with Trace(model, is_attention) as trace:
        out = checkpoint(model.topology, x, use_reentrant=reentrant)
        forward = len(trace.records)
        out.sum().backward()  # runs the forward again
    assert forward == len(trace.records) == 3
    for got, expected in zip(trace.outputs, plain.outputs, strict=True):
        torch.testing.assert_close(got, expected)
    assert x.grad is not None
    assert hooks_of(model) == 0


def test_without_detach_gradients_flow_under_checkpointing(model: Model) -> None:
    x = model.embedder(TOKENS).detach().requires_grad_()
    with Trace(model, is_attention, detach=False) as trace:
        checkpoint(model.topology, x, use_reentrant=False)
        trace.outputs[0].sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert len(trace.records) == 3


def test_compiled_models_record_inside_the_block_and_stop_after_it() -> None:
    torch.compiler.reset()
    model = build_model(spec(attention("standard")), seed=0)  # three graphs are made of it
    with torch.no_grad():
        with Trace(model, is_attention) as plain:
            expected = model(TOKENS)
        compiled = torch.compile(model, backend="aot_eager")
        with Trace(compiled, is_attention) as trace:
            for _ in range(2):
                torch.testing.assert_close(compiled(TOKENS), expected)
        assert [record.name for record in trace.records] == 2 * [record.name for record in plain.records]
        for got, wanted in zip(trace.outputs, 2 * plain.outputs, strict=True):
            torch.testing.assert_close(got, wanted)
        assert hooks_of(model) == 0
        torch.testing.assert_close(compiled(TOKENS), expected)
    assert len(trace.records) == 2


def test_compiled_blocks_keep_the_names_of_the_model(model: Model) -> None:
    torch.compiler.reset()
    model.topology.layers[0] = torch.compile(model.topology.layers[0], backend="eager")  # pyright: ignore
    with torch.no_grad(), Trace(model, is_attention) as trace:
        model(TOKENS)
    assert trace.records[0].name == "topology.layers.0"
    assert len(trace.records) == 3


def test_hooks_go_when_the_block_raises_and_a_trace_opens_once(model: Model) -> None:
    trace = Trace(model, is_attention)
    with pytest.raises(ConfigError, match=r"open already; make another Trace"), trace, trace:
        pass
    assert hooks_of(model) == 0
    with pytest.raises(ZeroDivisionError), trace:
        raise ZeroDivisionError
    assert hooks_of(model) == 0
    with trace:
        model(TOKENS)
    assert len(trace.records) == 3


def test_a_predicate_that_raises_leaves_no_hook(model: Model) -> None:
    def predicate(name: str, module: torch.nn.Module) -> bool:
        if name == "head":
            raise KeyError(name)
        return True

    with pytest.raises(KeyError), Trace(model, predicate):
        pass
    assert hooks_of(model) == 0
