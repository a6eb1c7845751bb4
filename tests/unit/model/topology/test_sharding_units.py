"""Which modules are gathered as one when a model's weights are sharded."""

from __future__ import annotations

from caramba.config.extension import parse_node
from caramba.model.topology import build_node, sharding_units

NORM = {"type": "RMSNormLayer", "d_model": 8}
MLP = {"type": "SwiGLULayer", "d_model": 8, "d_ff": 8}
RESIDUAL = {"type": "ResidualTopology", "layers": [NORM, MLP]}


def names(layers: list[dict[str, object]], types: tuple[str, ...] | None = None) -> list[list[str]]:
    topology = build_node(parse_node({"type": "StackedTopology", "layers": layers}))
    of = {id(module): name for name, module in topology.named_modules()}
    return [[of[id(module)] for module in unit] for unit in sharding_units(topology, types)]


def test_units_are_repeats_and_nodes_and_lists_that_run_again_stay_whole() -> None:
    nested = {"type": "NestedTopology", "layers": [RESIDUAL, RESIDUAL], "repeat": 2}
    cyclic = {"type": "CyclicTopology", "layers": [RESIDUAL], "n_cycles": 3}
    inner = {"type": "SequentialTopology", "layers": [MLP, NORM]}
    found = names([nested, cyclic, inner, NORM])
    one, two = (
        ["layers.0.layers.0", "layers.0.layers.1"],
        ["layers.0.layers.2", "layers.0.layers.3"],
    )
    assert found == [one, two, ["layers.1"], ["layers.2.layers.0"]], "the last norm is gathered with the rest"
    topology = build_node(parse_node({"type": "StackedTopology", "layers": [MLP]}))
    (mlp,) = topology.layers
    mlp.__class__ = type("SharedSwiGLULayer", (type(mlp),), {})  # as tensor parallelism makes of it
    assert sharding_units(topology, ("SwiGLULayer",)) == [[mlp]]
    assert names([nested], ("SwiGLULayer",)) == [[f"layers.0.layers.{i}.layers.1"] for i in range(4)]
