"""A compiled training step calls the kernels of joined products, forward and backward, and gives the plain numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.profiler import ProfilerActivity, profile

from caramba import kernels
from caramba.config.layer import AttentionLayerConfig, SwiGLULayerConfig
from caramba.lower import fuse_training
from caramba.lower.lowering import lower
from caramba.model.topology import build_node
from caramba.ops import backend

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
        return make_boxed_func(graph.forward)

    expected = step(layers)
    monkeypatch.setattr(fuse_training, "FUSED_DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(fuse_training, "MIN_ROWS", 1)
    for op in ("rope_qkv", "swiglu_packed"):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "triton")
    lower(layers, "cpu", "train", is_compiled=True)
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_calls_them_on_a_gpu(dtype: torch.dtype) -> None:
    """Against the same layers in float64, at no more than twice the error of what Inductor makes by itself."""
    kernels.load("cuda")
    torch.manual_seed(0)
    config = GQA | {"d_model": 256}
    layers = nn.Sequential(
        build_node(AttentionLayerConfig.model_validate(config)),
        build_node(SwiGLULayerConfig(d_model=256, d_ff=704)),
    ).to("cuda", dtype)
    wide = copy.deepcopy(layers).double()
    x = torch.randn(4, 300, 256, device="cuda", dtype=dtype)

    def step(run: nn.Module | Callable[[Tensor], Tensor], of: nn.Module, inputs: Tensor) -> list[Tensor]:
        y = run(inputs)
        return [y.detach(), *torch.autograd.grad(y.square().mean(), list(of.parameters()))]

    def worst(found: list[Tensor], expected: list[Tensor]) -> float:
        pairs = zip(found, expected, strict=True)
        return max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)

    expected = step(wide, wide, x.double())
    with backend.without_kernels("rope_qkv", "swiglu_packed"):
        plain = worst(step(torch.compile(layers), layers, x), expected)
    torch.compiler.reset()
    lower(layers, "cuda", "train", is_compiled=True)
    compiled = torch.compile(layers)
    ours = worst(step(compiled, layers, x), expected)
    assert ours <= 2 * plain + 1e-6, (ours, plain)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(compiled, layers, x)
    names = {event.key for event in profiler.key_averages()}
    torch.compiler.reset()
    wanted = ("rope_qkv", "rope_qkv_backward", "swiglu_packed", "swiglu_packed_backward")
    assert {f"caramba::{name}" for name in wanted} <= names
