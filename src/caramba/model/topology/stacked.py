"""A list of nodes run in order."""

from __future__ import annotations

from torch import Tensor

from caramba.cache import Context
from caramba.layer.cpu_decode import CpuDecodeStep
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology, chain_fast_paths


class StackedTopology(Topology):
    """Run the list in order: y = f_n(... f_1(x)). Serves SequentialTopology too.

    Shape: whatever the nodes make of [B, T, M].
    """

    def decode_fast_path(self) -> CpuDecodeStep | None:
        # A subclass overrides forward.
        return chain_fast_paths(self.layers) if type(self) is StackedTopology else None

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        y = self.run_fast_path(x, ctx)
        return self.run(x, ctx) if y is None else y
