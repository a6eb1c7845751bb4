"""A list of nodes repeated in depth with separate weights."""

from __future__ import annotations

from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.topology import NestedTopologyConfig
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology
from caramba.model.topology.build import build_nodes


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
