"""Recurrence over depth with one set of weights."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.cache import Context
from caramba.config.topology import RecurrentTopologyConfig
from caramba.layer.documents import Documents
from caramba.model.topology.base import Topology


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
