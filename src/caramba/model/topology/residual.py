"""A skip connection around a list of nodes."""

from __future__ import annotations

from torch import Tensor

from caramba.cache import Context, DeviceContext
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology


class ResidualTopology(Topology):
    """y = x + f(x), f being the list run in order.

    Shape: [..., M] to [..., M].

    Reference: He et al., 2015, arXiv:1512.03385.
    """

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        return x + self.run(x, ctx)
