"""The op `caramba::cos_sin`: cosines and sines that a compiled graph has to keep, and not compute at every use."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError

torch.library.define("caramba::cos_sin", "(Tensor angles) -> (Tensor, Tensor)")


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


def reference_cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    return angles.cos(), angles.sin()


torch.library.impl("caramba::cos_sin", "CompositeExplicitAutograd", reference_cos_sin)


@torch.library.register_fake("caramba::cos_sin")
def _(angles: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(angles), torch.empty_like(angles)
