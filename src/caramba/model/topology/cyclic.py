"""A list of nodes run several times with shared weights."""

from __future__ import annotations

from torch import Tensor

from caramba.cache import Context
from caramba.config.topology import CyclicTopologyConfig
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology


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
