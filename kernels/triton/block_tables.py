"""Block formats as the kernels of quantise and dequantise need them; a test holds them against `caramba.ops`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from caramba.kernels.triton.dba_decode_kernel import NF4_LEVELS
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Elements of a block, array elements of its codes, and the types of the two arrays."""

    elements: int
    code_width: int
    code_dtype: torch.dtype
    scale_dtype: torch.dtype


BLOCKS = {
    "q8_0": Blocks(32, 32, torch.int8, torch.float16),
    "q4_0": Blocks(32, 16, torch.uint8, torch.float16),
    "nf4": Blocks(64, 32, torch.uint8, torch.float32),
}


def nf4_levels() -> Tensor:
    """Return the sixteen levels, fp32 on the CPU."""
    return torch.tensor(NF4_LEVELS)


def nf4_middles() -> Tensor:
    """Return the fifteen middles between neighbouring levels, fp32 on the CPU."""
    levels = nf4_levels()
    return (levels[1:] + levels[:-1]) / 2
