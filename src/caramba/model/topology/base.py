"""Topologies: lists of nodes, and how a forward runs through them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.config.topology import (
    CyclicTopologyConfig,
    NestedTopologyConfig,
    RecurrentTopologyConfig,
    TopologyConfig,
)
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents
from caramba.model.topology.build import build_nodes, own_config


class Topology(nn.Module):
    """A module that runs other modules. `passes` is how many times one forward runs through `layers`.

    Every node is called as node(x, ctx) in a fixed order, the same in each forward: caches are handed out by
    it.
    """

    passes: int = 1

    def __init__(self, config: TopologyConfig) -> None:
        super().__init__()
        self.layers = build_nodes(config.layers)

    def run(self, x: Tensor, ctx: Context | DeviceContext | Documents | None) -> Tensor:
        """Run the list once, each node on the output of the one before."""
        for layer in self.layers:
            x = layer(x, ctx)
        return x


def applications(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (qualified name, layer) for every attention or custom-layer application, in execution order.

    Shared weights that run several times appear as many times. Layers inside a custom layer are not listed.
    """
    if isinstance(module, AttentionLayer) or own_config(module) is not None:
        yield name, module
        return
    for _ in range(module.passes if isinstance(module, Topology) else 1):
        for child_name, child in module.named_children():
            yield from applications(child, f"{name}.{child_name}" if name else child_name)


def custom_layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (qualified name, layer) of each distinct custom layer, in execution order."""
    return [
        (name, layer) for name, layer in dict(applications(model)).items() if own_config(layer) is not None
    ]


def attention_applications(module: nn.Module, name: str = "") -> Iterator[tuple[str, AttentionLayer]]:
    """Yield (qualified name, layer) for every attention application of one forward, in execution order.

    Shared weights that run several times appear as many times.
    """
    for found, layer in applications(module, name):
        if isinstance(layer, AttentionLayer):
            yield found, layer


class StackedTopology(Topology):
    """Run the list in order: y = f_n(... f_1(x)). Serves SequentialTopology too.

    Shape: whatever the nodes make of [B, T, M].
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return self.run(x, ctx)


class ResidualTopology(Topology):
    """y = x + f(x), f being the list run in order.

    Shape: [..., M] to [..., M].

    Reference: He et al., 2015, arXiv:1512.03385.
    """

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        return x + self.run(x, ctx)


class NestedTopology(Topology):
    """Run the list `repeat` times in order, each repeat with weights of its own.

    `layers` holds all repeats in a row: node i of repeat r is layers[r * n + i] of a list of n nodes.

    Shape: whatever the nodes make of [B, T, M].
    """

    def __init__(self, config: NestedTopologyConfig) -> None:
        super().__init__(config)
        self.config = config
        self.runs: tuple[nn.Module, ...] | None = (
            None  # the repeats, where each runs as one: see checkpointing.py
        )
        for _ in range(config.repeat - 1):
            self.layers.extend(build_nodes(config.layers))

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        if self.runs is None:
            return self.run(x, ctx)
        for repeat in self.runs:
            x = repeat(x, ctx)
        return x


class CyclicTopology(Topology):
    """Run the list `n_cycles` times with the same weights; each cycle's attention has a cache of its own.

    Shape: [B, T, M] to [B, T, M].

    Reference: Dehghani et al., 2018, arXiv:1807.03819, without its adaptive halting.
    """

    def __init__(self, config: CyclicTopologyConfig) -> None:
        super().__init__(config)
        self.passes = config.n_cycles

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        for _ in range(self.passes):
            x = self.run(x, ctx)
        return x


class ParallelTopology(Topology):
    """Feed the same x to each of N nodes and stack the outputs on a new dimension -2.

    Shape: [B, T, M] to [B, T, N, M']; a LinearLayer with `reduce` consumes the stack.
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return torch.stack([layer(x, ctx) for layer in self.layers], dim=-2)


class BranchingTopology(Topology):
    """Feed the same x to each node and concatenate the outputs on the features.

    Shape: [..., M] to [..., M_1 + ... + M_N].
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return torch.cat([layer(x, ctx) for layer in self.layers], dim=-1)


class RecurrentTopology(Topology):
    """Return h after `steps` updates h <- f(h + x) from h = 0.

    f runs the list in order. The input stays visible at every depth. Each step's attention has a separate cache.

    Shape: [B, T, M] to [B, T, M].
    """

    def __init__(self, config: RecurrentTopologyConfig) -> None:
        super().__init__(config)
        self.passes = config.steps

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        state = torch.zeros_like(x)
        for _ in range(self.passes):
            state = self.run(state + x, ctx)
        return state
