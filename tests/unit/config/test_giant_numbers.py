"""Numbers that no model has are refused by the key that holds them, before anything of their size is built."""

from __future__ import annotations

from typing import Any

import pytest

from caramba.config.estimate import model_cost
from caramba.config.model import ModelSpec
from caramba.config.parse import parse_as
from caramba.errors import ConfigError

NORM = {"type": "RMSNormLayer", "d_model": 4}
ATTENTION = {"type": "AttentionLayer", "d_model": 4, "n_heads": 2}


def model(*layers: dict[str, Any], **embedder: Any) -> dict[str, Any]:
    return {
        "embedder": {"vocab_size": 8, "d_model": 4, **embedder},
        "topology": {"type": "StackedTopology", "layers": list(layers)},
    }


def repeated(node: dict[str, Any], times: int, depth: int = 1, kind: str = "Nested") -> dict[str, Any]:
    key = {"Nested": "repeat", "Cyclic": "n_cycles", "Recurrent": "steps"}[kind]
    for _ in range(depth):
        node = {"type": f"{kind}Topology", key: times, "layers": [node]}
    return node


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        (model(NORM, vocab_size=2**31), "embedder.vocab_size"),
        (model(NORM, max_positions=10**400, type="token_position"), "embedder.max_positions"),
        (model({**NORM, "d_model": 2**63}), "topology.layers[0].d_model"),
        (model({**ATTENTION, "n_heads": 10**30}), "topology.layers[0].n_heads"),
        (model(repeated(NORM, 10**9)), "topology.layers[0].repeat"),
        (model(repeated(ATTENTION, 10**30, kind="Cyclic")), "topology.layers[0].n_cycles"),
        (model(repeated(ATTENTION, 2**62, kind="Recurrent")), "topology.layers[0].steps"),
    ],
)
def test_model_with_a_giant_number_is_refused_by_key(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_as(ModelSpec, tree)
    assert str(caught.value).startswith(f"{key}: got ")
    assert "less than or equal to" in str(caught.value)


@pytest.mark.parametrize("kind", ["Nested", "Cyclic", "Recurrent"])
@pytest.mark.parametrize("layer", [NORM, ATTENTION])
def test_model_cost_of_giant_nested_repeats_is_refused_by_path(layer: dict[str, Any], kind: str) -> None:
    spec = parse_as(ModelSpec, model(repeated(layer, 100_000, depth=40, kind=kind)))
    text = (
        r"^model\.topology(\.layers\[0\])+: runs at most 100,000 layers in a forward, got 10,000,000,000; repeat fewer"
    )
    with pytest.raises(ConfigError, match=text):
        model_cost(spec)


def test_model_cost_counts_the_layers_that_run() -> None:
    spec = parse_as(ModelSpec, model(repeated(ATTENTION, 3, depth=2), NORM))
    assert model_cost(spec).topology.runs == 10
