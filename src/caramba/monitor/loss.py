"""The mean loss of the last micro-batches, which goes on over interrupts."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed
from torch import Tensor

from caramba.runtime import get_world_size, is_distributed


class RunningLoss:
    """Keeps the losses of the last `window` micro-batches on their device, so that adding one waits for nothing."""

    def __init__(self, window: int = 50) -> None:
        self._losses: deque[Tensor] = deque(maxlen=window)

    def add(self, loss: Tensor) -> None:
        """Add a loss []; a copy is kept, since a CUDA graph writes the next one over it."""
        self._losses.append(loss.detach().float().clone())

    def mean(self) -> float:
        """Return the mean over the window and all ranks, NaN before the first loss."""
        if not self._losses:
            return float("nan")
        device = self._losses[-1].device
        mean = torch.stack([loss.to(device) for loss in self._losses]).mean()
        if is_distributed():
            torch.distributed.all_reduce(mean)
            mean /= get_world_size()
        return float(mean)

    def state_dict(self) -> dict[str, list[float]]:
        """Return the losses in the window."""
        return {"losses": [float(loss) for loss in self._losses]}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on from the losses of an interrupted phase."""
        self._losses.clear()
        self._losses.extend(torch.tensor(value) for value in state["losses"])
