"""Topologies against hand-written computations from their own layers, and where caches are handed out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from caramba.cache import Context, new_layer_cache
from caramba.config.extension import NodeConfig, parse_node
from caramba.errors import ConfigError
from caramba.model.topology import StackedTopology, attention_applications, build_node

LINEAR = {"type": "LinearLayer", "d_in": 8, "d_out": 8, "bias": True}
NORM = {"type": "RMSNormLayer", "d_model": 8}
ATTENTION = {"type": "AttentionLayer", "d_model": 8, "n_heads": 2}
X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))


def build(type: str, layers: list[dict[str, Any]], **fields: Any) -> nn.Module:
    torch.manual_seed(1)
    return build_node(parse_node({"type": type, "layers": layers, **fields}))


def weight_and_bias(module: Any, index: int) -> tuple[Tensor, Tensor]:
    layer = module.layers[index]  # pyright: ignore
    return layer.weight, layer.bias


@pytest.mark.parametrize("type", ["StackedTopology", "SequentialTopology"])
def test_stacked_and_sequential_run_in_order(type: str) -> None:
    topology = build(type, [LINEAR, {**LINEAR, "d_out": 5}])
    assert isinstance(topology, StackedTopology)
    (w0, b0), (w1, b1) = weight_and_bias(topology, 0), weight_and_bias(topology, 1)
    torch.testing.assert_close(topology(X), (X @ w0.T + b0) @ w1.T + b1)


def test_residual_adds_its_input() -> None:
    topology = build("ResidualTopology", [LINEAR, LINEAR])
    (w0, b0), (w1, b1) = weight_and_bias(topology, 0), weight_and_bias(topology, 1)
    torch.testing.assert_close(topology(X), X + (X @ w0.T + b0) @ w1.T + b1)


def test_nested_repeats_with_separate_weights() -> None:
    topology = build("NestedTopology", [LINEAR, NORM], repeat=3)
    weights = [weight_and_bias(topology, i)[0] for i in (0, 2, 4)]
    assert len(topology.layers) == 6  # pyright: ignore
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    expected = X
    for index in range(0, 6, 2):
        w, b = weight_and_bias(topology, index)
        expected = expected @ w.T + b
        expected = expected / (expected.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(topology(X), expected)


def test_parallel_stacks_on_a_new_dimension_before_the_features() -> None:
    topology = build("ParallelTopology", [LINEAR, LINEAR, LINEAR])
    out = topology(X)
    assert out.shape == (2, 3, 3, 8)
    for index in range(3):
        w, b = weight_and_bias(topology, index)
        torch.testing.assert_close(out[:, :, index], X @ w.T + b)
    one = topology(X[:1, :1])
    assert one.shape == (1, 1, 3, 8)
    torch.testing.assert_close(one, out[:1, :1])


def test_parallel_is_consumed_by_a_linear() -> None:
    reduced = build(
        "StackedTopology",
        [
            {"type": "ParallelTopology", "layers": [LINEAR, LINEAR]},
            {**LINEAR, "d_in": 16, "reduce": "concat"},
        ],
    )
    branching = build(
        "StackedTopology", [{"type": "BranchingTopology", "layers": [LINEAR, LINEAR]}, {**LINEAR, "d_in": 16}]
    )
    assert reduced(X).shape == (2, 3, 8)
    torch.testing.assert_close(reduced(X), branching(X))


def test_branching_concatenates_on_the_features() -> None:
    topology = build("BranchingTopology", [LINEAR, {**LINEAR, "d_out": 5}])
    out = topology(X)
    assert out.shape == (2, 3, 13)
    (w0, b0), (w1, b1) = weight_and_bias(topology, 0), weight_and_bias(topology, 1)
    torch.testing.assert_close(out, torch.cat((X @ w0.T + b0, X @ w1.T + b1), dim=-1))


def test_cyclic_shares_its_weights() -> None:
    topology = build("CyclicTopology", [LINEAR], n_cycles=3)
    w, b = weight_and_bias(topology, 0)
    assert sum(1 for _ in topology.parameters()) == 2
    torch.testing.assert_close(topology(X), ((X @ w.T + b) @ w.T + b) @ w.T + b)


def test_recurrent_passes_a_state_and_sees_its_input() -> None:
    topology = build("RecurrentTopology", [LINEAR], steps=3)
    w, b = weight_and_bias(topology, 0)
    state = torch.zeros_like(X)
    for _ in range(3):
        state = (state + X) @ w.T + b
    torch.testing.assert_close(topology(X), state)
    cyclic = build("CyclicTopology", [LINEAR], n_cycles=3)
    assert not torch.allclose(cyclic(X), topology(X))


def test_applications_come_in_execution_order() -> None:
    cyclic = {
        "type": "CyclicTopology",
        "layers": [ATTENTION, {"type": "ResidualTopology", "layers": [ATTENTION]}],
        "n_cycles": 2,
    }
    root = build("StackedTopology", [ATTENTION, cyclic, {"type": "NestedTopology", "layers": [ATTENTION], "repeat": 2}])
    names = [name for name, _ in attention_applications(root)]
    shared = ["layers.1.layers.0", "layers.1.layers.1.layers.0"]
    assert names == ["layers.0", *shared, *shared, "layers.2.layers.0", "layers.2.layers.1"]
    assert all(root.get_submodule(name) is layer for name, layer in attention_applications(root))


def test_each_cycle_has_a_cache_of_its_own() -> None:
    topology = build("CyclicTopology", [ATTENTION], n_cycles=2)
    ctx = Context([new_layer_cache(layer.dims, 2, 8) for _, layer in attention_applications(topology)])
    ctx.begin()
    with torch.no_grad():
        out = topology(X, ctx)
    ctx.commit(3)
    torch.testing.assert_close(out, topology(X))
    first, second = (cache.read()["k"] for cache in ctx.caches)
    assert first.shape == second.shape == (2, 2, 3, 4)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("caramba.layer.nowhere:Layer", r"cannot find target 'caramba.layer.nowhere:Layer'"),
        ("caramba.layer.linear:Nothing", r"cannot find target 'caramba.layer.linear:Nothing'"),
        ("caramba.layer.linear:REDUCTIONS", r"is not a torch.nn.Module class"),
    ],
)
def test_a_target_that_is_no_module_is_named(target: str, message: str) -> None:
    class PluginLayerConfig(NodeConfig):
        pass

    PluginLayerConfig.target = target  # set afterwards, so that the schema is not registered for other tests
    with pytest.raises(ConfigError, match=rf"PluginLayer: .*{message}"):
        build_node(PluginLayerConfig(type="PluginLayer"))
