"""A list of nodes run in order."""

from __future__ import annotations

from torch import Tensor

from caramba.cache import Context
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology


class StackedTopology(Topology):
    """Run the list in order: y = f_n(... f_1(x)). Serves SequentialTopology too.

    Shape: whatever the nodes make of [B, T, M].
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return self.run(x, ctx)
