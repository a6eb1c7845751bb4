"""The first blocks of a model: which nodes they are, that they read as the model does, and what cannot be left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_specs import MLP, NORM, attention, block, spec, transformer

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.model import EarlyExit, build_model

TOKENS = torch.randint(0, 23, (2, 9), generator=torch.Generator().manual_seed(0))
RESIDUAL = {"type": "ResidualTopology", "layers": [NORM, attention("standard")]}


@pytest.mark.parametrize("n_blocks", [1, 2])
def test_it_is_the_shorter_model_of_the_same_weights(n_blocks: int) -> None:
    model = build_model(transformer("decoupled", repeat=3), seed=0).eval()
    short = build_model(transformer("decoupled", repeat=n_blocks), seed=1).eval()
    short.load_state_dict({name: model.state_dict()[name] for name in short.state_dict()})
    early = EarlyExit(model, n_blocks)
    ctx = model.new_context(2, 12)
    with torch.inference_mode():
        model(TOKENS[:, :5], ctx)
        shared = early.shared(ctx)
        shared.position = 5
        found = early.logits(early.hidden(TOKENS[:, 5:], shared))
        torch.testing.assert_close(found, short(TOKENS)[:, 5:])
        # What it stored is taken back by the model's next forward.
        torch.testing.assert_close(model(TOKENS[:, 5:], ctx), model(TOKENS)[:, 5:])
    assert len(early.new_context(1, 4, KVCacheKind.FP32).caches) == n_blocks


@pytest.mark.parametrize(
    ("layers", "n_left"),
    [
        ([{"type": "CyclicTopology", "layers": [block("standard")], "n_cycles": 3}], 1),
        ([NORM, RESIDUAL, {"type": "ResidualTopology", "layers": [MLP]}, RESIDUAL], 1),
    ],
)
def test_cycles_and_plain_stacks_are_unrolled(layers: list[dict[str, Any]], n_left: int) -> None:
    model = build_model(spec(*layers), seed=0).eval()
    early = EarlyExit(model)
    assert len(early.layers) == n_left
    with torch.inference_mode():
        x = model.embedder(TOKENS)
        for node in early.nodes:
            x = node(x, None)
        torch.testing.assert_close(early.hidden(TOKENS, early.new_context(2, 9, KVCacheKind.FP32)), x)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([block("standard")], "1 residual blocks with attention, leaving early needs 2"),
        (
            [{"type": "RecurrentTopology", "layers": [block("standard")], "steps": 3}],
            "node 0 .*RecurrentTopology",
        ),
        ([RESIDUAL, attention("standard"), RESIDUAL], "node 1 of the topology is a AttentionLayer"),
        ([RESIDUAL, NORM, RESIDUAL], "node 1 of the topology is a RMSNormLayer"),
    ],
)
def test_other_topologies_are_refused_with_the_reason(layers: list[dict[str, Any]], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EarlyExit(build_model(spec(*layers), seed=0))
