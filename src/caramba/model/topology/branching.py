"""Nodes side by side, their outputs concatenated."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.cache import Context
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology


class BranchingTopology(Topology):
    """Feed the same x to each node and concatenate the outputs on the features.

    Shape: [..., M] to [..., M_1 + ... + M_N].
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return torch.cat([layer(x, ctx) for layer in self.layers], dim=-1)
