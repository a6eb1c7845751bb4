"""The op `caramba::cos_sin`: cosines and sines that a compiled graph has to keep, and not compute at every use."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of angles, without gradients.

    Inductor computes elementwise inputs of a kernel inside it: a rotation of 32 heads would take every cosine 64 times,
    which costs several times what it reads and writes. What an op gives out is in memory.

    Shape: any floating, to two of the same.

    Raises:
        ConfigError: angles that are not floating.
    """
    if not angles.is_floating_point():
        raise ConfigError(f"cos_sin: angles are {angles.dtype}, expected a floating dtype")
    return torch.ops.caramba.cos_sin.default(angles)


@caramba_op(
    "cos_sin", fake=lambda angles: (torch.empty_like(angles), torch.empty_like(angles)), takes_kernel=False
)
def reference_cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    return angles.cos(), angles.sin()
