"""When the small-batch linear kernel (GEMV and skinny GEMM) of decode steps applies."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.ops import has_kernel

SMALL_BATCH_ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 2}
"""Rows up to which products by `small_batch_linear` are taken, by dtype.

The four products of a 1B layer with norm, gate and sums take 37 us by it with 1 row on an H200; with 8 rows of 16 bits
48 by it and 66 by the library, with 32 rows 52 and 68. Numbers of 32 bits have no tensor cores: there arithmetic takes
longer than reading the weights.
"""


def is_small_batch(x: Tensor) -> bool:
    """True if the small-batch kernel applies: kernel attached, few rows, no grad or autocast."""
    return (
        not torch.is_grad_enabled()
        and 0 < x.numel() <= SMALL_BATCH_ROWS.get(x.dtype, 0) * x.shape[-1]
        and has_kernel("small_batch_linear", x)
        and not torch.is_autocast_enabled(x.device.type)
    )
