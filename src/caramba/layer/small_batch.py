"""The few rows of a decode step, whose products have a kernel of their own: when it is taken."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from caramba.ops import has_kernel, rows_fit
from caramba.ops.latent_queries import HALF

SMALL_BATCH_ROWS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 2}
"""Rows up to which products by `small_batch_linear` are taken, by dtype.

The four products of a 1B layer with norm, gate and sums take 37 us by it with 1 row on an H200; with 8 rows of 16 bits
48 by it and 66 by the library, with 32 rows 52 and 68. Numbers of 32 bits have no tensor cores: there arithmetic takes
longer than reading the weights.
"""


def is_small_batch(x: Tensor) -> bool:
    """Whether x is few rows, without gradients, on a device that has the kernel."""
    return (
        not torch.is_grad_enabled()
        and 0 < x.numel() <= SMALL_BATCH_ROWS.get(x.dtype, 0) * x.shape[-1]
        and has_kernel("row_linear", x)
        and not torch.is_autocast_enabled(x.device.type)
    )


def has_separate_norm(x: Tensor) -> bool:
    """Whether the kernel of few rows x has the norm before it as a launch of its own: then one product should take what
    it makes, not several."""
    return x.dtype in HALF and x.numel() > x.shape[-1]


def has_kernel_weight(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes the product of few rows x with a weight: a plain one, neither quantised nor sharded."""
    return type(weight) is nn.Parameter and rows_fit(x, weight)


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module or comes out of it, or has given it a forward of its own."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)
