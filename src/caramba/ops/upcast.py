"""The dtype that sums and roots are computed in."""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def upcast(x: Tensor) -> Tensor:
    """Return x in at least float32."""
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))


def empty_upcast(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return an uninitialised tensor of `shape` in the dtype that `widened` gives x."""
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))
