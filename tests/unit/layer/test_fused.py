"""Layers take the ops where a kernel is attached, and leave compiled code to Inductor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.config.layer import (
    AttentionLayerConfig,
    LayerNormLayerConfig,
    RMSNormLayerConfig,
    SwiGLULayerConfig,
)
from caramba.model.topology import build_node
from caramba.ops import backend

CONFIGS = {
    "rms_norm": RMSNormLayerConfig(d_model=8),
    "layer_norm": LayerNormLayerConfig(d_model=8),
    "swiglu": SwiGLULayerConfig(d_model=8, d_ff=6),
    "rope": AttentionLayerConfig(d_model=8, n_heads=2),
}


class Calls(TorchDispatchMode):
    """Which of caramba's ops ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "caramba":
            self.names.add(func._opname)
        return func(*args, **(kwargs or {}))


def ran(layer: nn.Module, x: Tensor) -> tuple[set[str], list[Tensor]]:
    """The ops that ran, the output and the gradients."""
    with Calls() as calls:
        y = layer(x)
    return calls.names, [y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))]


@pytest.mark.parametrize("op", CONFIGS)
def test_layers_use_what_is_attached(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer, x = build_node(CONFIGS[op]), torch.randn(2, 5, 8)
    plain, expected = ran(layer, x)
    assert plain == set()
    monkeypatch.setitem(backend._attached, (op, "cpu"), "triton")
    names, got = ran(layer, x)
    assert op in names
    for ours, want in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, want)
    targets: list[str] = []

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    y = torch.compile(layer, fullgraph=True, backend=record)(x)
    torch.testing.assert_close(y, expected[0])
    assert targets
    assert not any("caramba" in target for target in targets)


def test_autocast_keeps_the_dtype_of_a_layer_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = build_node(CONFIGS["layer_norm"]), torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x)
        monkeypatch.setitem(backend._attached, ("layer_norm", "cpu"), "triton")
        assert torch.equal(layer(x), expected)
