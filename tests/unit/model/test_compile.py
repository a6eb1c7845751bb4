"""Networks compile whole: one graph, no break, the same numbers and gradients."""

from __future__ import annotations

import pytest
import torch
from model_specs import ATTENTION, VOCAB, block, spec

from caramba.model import build_model

TOKENS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def assert_compiles_whole(model: torch.nn.Module) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    expected = model(TOKENS)
    torch.testing.assert_close(compiled(TOKENS), expected)
    gradients = []
    for side in (model, compiled):
        model.zero_grad()
        side(TOKENS).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", ATTENTION)
def test_every_attention_is_one_graph(name: str) -> None:
    assert_compiles_whole(build_model(spec(block(name)), seed=0))


def test_every_scaling_and_repeated_weights_are_one_graph() -> None:
    scaled = block("standard")
    scaled["layers"][0]["layers"][1] |= {"rope_scaling": YARN, "q_chunk": 4, "local_window": 6}
    cyclic = {"type": "CyclicTopology", "n_cycles": 2, "layers": [block("standard")]}
    assert_compiles_whole(build_model(spec(scaled, cyclic, max_positions=16, tied=False), seed=0))
