"""What the ops over rows, the last axis, ask of their arguments."""

from __future__ import annotations

from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import describe


def check_rows(op: str, x: Tensor, residual: Tensor | None = None, **affine: Tensor | None) -> None:
    """Check a tensor of rows, its residual, and vectors as long as a row.

    Raises:
        ConfigError: x is not floating point, the residual differs from it, or a vector is not floating [D] on its
            device.
    """
    if not x.is_floating_point() or x.dim() < 1:
        raise ConfigError(
            f"{op}: x is {x.dtype} of shape {tuple(x.shape)}, expected a floating dtype and one axis at least"
        )
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device
    ):
        raise ConfigError(f"{op}: residual is {describe(residual)}, expected {describe(x)}, as x")
    width = x.shape[-1]
    for name, vector in affine.items():
        if vector is None:
            continue
        fits = vector.dim() == 1 and vector.shape[0] == width and vector.is_floating_point()
        if not fits or vector.device != x.device:
            raise ConfigError(
                f"{op}: {name} is {describe(vector)}, expected floating ({width},) on {x.device}"
            )
