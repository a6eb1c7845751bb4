"""The mean loss of the last optimiser steps, continued over interrupts."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed
from torch import Tensor

from caramba.runtime import get_world_size, is_distributed


class RunningLoss:
    """The losses of the last `window` optimiser steps, stored on their device.

    Adding one does not synchronise with the device.

    The loss of a step weighs its micro-batches and ranks as its gradient does, so that the mean does not depend on how
    a batch is split.
    """

    def __init__(self, window: int = 50) -> None:
        self._losses: deque[Tensor] = deque(maxlen=window)

    def add(self, loss: Tensor) -> None:
        """Add a copy of the loss [] of an optimiser step; a CUDA graph overwrites the original."""
        self._losses.append(loss.detach().float().clone())

    def mean(self, *, over_ranks: bool = False) -> float:
        """Return the mean over the window in nats, NaN before the first step.

        Args:
            over_ranks: average the ranks too, where each adds a loss of its own; every rank calls this then.
        """
        if not self._losses:
            return float("nan")
        device = self._losses[-1].device
        mean = torch.stack([loss.to(device) for loss in self._losses]).mean()
        if over_ranks and is_distributed():
            torch.distributed.all_reduce(mean)
            mean /= get_world_size()
        return float(mean)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the losses in the window."""
        return {"losses": [float(loss) for loss in self._losses]}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Continue from the losses of an interrupted phase."""
        self._losses.clear()
        self._losses.extend(torch.tensor(value) for value in state["losses"])
