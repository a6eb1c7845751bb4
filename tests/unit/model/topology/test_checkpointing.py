"""Activation checkpointing: the same gradients to the bit, less kept, products not computed twice."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.config.layer import (
    AttentionLayerConfig,
    LinearLayerConfig,
    RMSNormLayerConfig,
    SwiGLULayerConfig,
)
from caramba.config.topology import (
    CyclicTopologyConfig,
    NestedTopologyConfig,
    ResidualTopologyConfig,
    StackedTopologyConfig,
)
from caramba.lower import split_keys
from caramba.lower.lowering import lower
from caramba.model.topology import build_node, checkpoint_topology, clear_checkpointing, compilable_regions
from caramba.ops import backend

WIDTH = 16


@pytest.fixture(scope="module")
def topology() -> nn.Module:
    norm = RMSNormLayerConfig(d_model=WIDTH)
    attention = AttentionLayerConfig(d_model=WIDTH, n_heads=2, head_dim=8, dropout=0.25)
    pair = (
        ResidualTopologyConfig(layers=(norm, attention)),
        ResidualTopologyConfig(layers=(norm, SwiGLULayerConfig(d_model=WIDTH, d_ff=24))),
    )
    cycle = CyclicTopologyConfig(layers=(pair[1],), n_cycles=2)
    config = StackedTopologyConfig(layers=(NestedTopologyConfig(layers=pair, repeat=2), cycle, norm))
    torch.manual_seed(0)
    return build_node(config).double().train()


class Calls(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def step(topology: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Tensor], int, Counter[str]]:
    """Return gradients, the elements that the forward kept for backward, and the operators of both."""
    topology.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(2, 12, WIDTH, dtype=dtype, requires_grad=True)
    kept: dict[int, int] = {}
    with Calls() as calls:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda saved: (kept.__setitem__(saved.data_ptr(), saved.numel()), saved)[1], lambda saved: saved
        ):
            loss = topology(x).square().sum()
        loss.backward()
    grads = {name: value.grad.clone() for name, value in topology.named_parameters() if value.grad is not None}
    assert x.grad is not None
    return grads | {"x": x.grad}, sum(kept.values()), calls.names


@pytest.mark.parametrize("granularity", ["block", "layer"])
def test_gradients_are_equal_to_the_bit_and_less_is_kept(topology: nn.Module, granularity: Any) -> None:
    clear_checkpointing(topology)
    names = list(topology.state_dict())
    plain, kept, calls = step(topology)
    found = {}
    for mode in ("selective", "full"):
        parts = checkpoint_topology(topology, mode, granularity)
        assert len(parts) == {"block": 3, "layer": 5}[granularity]
        assert list(topology.state_dict()) == names
        gradients, less, found[mode] = step(topology)
        assert all(torch.equal(gradients[name], value) for name, value in plain.items())
        assert less < kept / 2
    assert found["selective"]["mm"] == calls["mm"]  # no product of weights is computed again
    assert found["full"]["mm"] > calls["mm"]
    assert found["selective"]["silu"] == found["full"]["silu"] > calls["silu"]
    clear_checkpointing(topology)
    assert step(topology)[1] == kept


def test_attention_by_a_kernel_of_our_own_is_not_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend._attached, ("decoupled_attention", "cpu"), "reference")
    monkeypatch.setattr(split_keys, "WIDEST", 9)
    dims = {"d_model": WIDTH, "n_heads": 2, "head_dim": 16, "sem_dim": 32, "geo_dim": 16}
    layer = AttentionLayerConfig.model_validate({"mode": "decoupled", "layout": "latent", **dims})
    torch.manual_seed(0)
    model = build_node(NestedTopologyConfig(layers=(layer,), repeat=2)).bfloat16()
    lower(model, "cpu", "train")
    plain, _, calls = step(model, torch.bfloat16)
    assert calls["decoupled_attention"] == 2
    for mode, times in (("selective", 2), ("full", 4)):
        checkpoint_topology(model, mode)
        gradients, _, found = step(model, torch.bfloat16)
        assert all(torch.equal(gradients[name], value) for name, value in plain.items())
        assert (found["decoupled_attention"], found["decoupled_attention_backward"]) == (times, 2)


def test_without_gradients_nothing_is_recomputed_and_regions_follow_the_parts(topology: nn.Module) -> None:
    parts = checkpoint_topology(topology, "full")
    assert compilable_regions(topology)[:2] == parts[:2]
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        inside = topology.eval()(x)
    clear_checkpointing(topology)
    assert torch.equal(inside, topology(x).detach())
    topology.train()


def test_a_lone_layer_is_a_part_and_a_bare_norm_is_not() -> None:
    linear = LinearLayerConfig(d_in=4, d_out=4)
    tree = build_node(StackedTopologyConfig(layers=(linear, RMSNormLayerConfig(d_model=4))))
    assert len(checkpoint_topology(tree, "full")) <= 1
    assert checkpoint_topology(tree, "none") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_gradients_are_equal_to_the_bit_on_a_gpu(topology: nn.Module, mode: str) -> None:
    clear_checkpointing(topology)
    model = copy.deepcopy(topology).float().cuda()
    x = torch.randn(2, 64, WIDTH, device="cuda")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cuda", torch.bfloat16):
            model(x).float().square().sum().backward()
        return [value.grad.clone() for value in model.parameters() if value.grad is not None]

    plain = gradients()
    checkpoint_topology(model, mode)
    assert all(torch.equal(one, other) for one, other in zip(gradients(), plain, strict=True))
