"""Copies of numbers to a device without a wait of the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

Numbers = Sequence[int] | Sequence[float] | Sequence[Sequence[int]]


def stage(numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers in the host's memory, from which a copy to `device` with `non_blocking` waits for nothing.

    For CUDA it is pinned: a copy from other memory first waits for all that its stream has been given. Pinned memory
    may be dropped while it is copied, torch does not reuse it until then.

    Shape: that of `numbers`.
    """
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")


def upload(numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return numbers on a device, for what comes next on its current stream, on CUDA without a wait. Shape: theirs."""
    # Without pinned memory, as on other devices than CUDA, the source could be freed before the copy.
    return stage(numbers, device, dtype).to(device, non_blocking=device.type == "cuda")
