"""Nodes side by side, their outputs stacked."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.cache import Context
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology


class ParallelTopology(Topology):
    """Feed the same x to each of N nodes and stack the outputs on a new dimension -2.

    Shape: [B, T, M] to [B, T, N, M']; a LinearLayer with `reduce` consumes the stack.
    """

    def forward(self, x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
        return torch.stack([layer(x, ctx) for layer in self.layers], dim=-2)
