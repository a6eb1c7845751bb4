"""Base class of topologies: a list of nodes, and how often a forward runs through it."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.config.topology import TopologyConfig
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


def attention_applications(module: nn.Module, name: str = "") -> Iterator[tuple[str, AttentionLayer]]:
    """Yield (qualified name, layer) for every attention application of one forward, in execution order.

    Shared weights that run several times appear as many times.
    """
    for found, layer in applications(module, name):
        if isinstance(layer, AttentionLayer):
            yield found, layer
