"""A list of nodes run in order."""

from __future__ import annotations

from torch import Tensor

from caramba.cache import Context
from caramba.layer.cpu_step import CpuStep
from caramba.layer.documents import Documents
from caramba.topology.base import Topology, step_of


class StackedTopology(Topology):
    """Run the list in order: y = f_n(... f_1(x)). Serves SequentialTopology too.

    Shape: whatever the nodes make of [B, T, M].
    """

    def find_step(self) -> CpuStep | None:
        # A subclass has a forward of its own.
        return step_of(self.layers) if type(self) is StackedTopology else None

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        stepped = self.stepped(x, ctx)
        return self.run(x, ctx) if stepped is None else stepped
