"""A compiled training step calls the kernels of joined products, forward and backward, and gives the plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from caramba.config.layer import AttentionLayerConfig, SwiGLULayerConfig
from caramba.layer import products
from caramba.ops import backend
from caramba.topology import build_node

GQA = {"mode": "gqa", "d_model": 16, "n_heads": 4, "n_kv_heads": 2}


def test_both_graphs_call_one_op_per_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced ahead of time as on a GPU, with the references in the kernels' places."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        build_node(AttentionLayerConfig.model_validate(GQA)),
        build_node(SwiGLULayerConfig(d_model=16, d_ff=24)),
    ).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def step(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        y = run(x)
        return [y, *torch.autograd.grad(y.square().sum(), list(layers.parameters()))]

    graphs: list[list[str]] = []

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        names = [str(node.target) for node in graph.graph.nodes]
        graphs.append([name for name in names if name.startswith("caramba.")])
        return graph

    expected = step(layers)
    monkeypatch.setattr(products, "JOINED_ON", frozenset({"cpu"}))
    monkeypatch.setattr(products, "LEAST_ROWS", 1)
    for op in ("rope_qkv", "swiglu_packed"):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "triton")
    torch.compiler.reset()
    traced = aot_autograd(fw_compiler=record, bw_compiler=record)
    found = step(torch.compile(layers, fullgraph=True, backend=traced))
    torch.compiler.reset()
    # Angles are in float32; what is multiplied with them is not.
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert graphs == [
        ["caramba.rope_qkv.default", "caramba.swiglu_packed.default"],
        ["caramba.swiglu_packed_backward.default", "caramba.rope_qkv_backward.default"],
    ]
