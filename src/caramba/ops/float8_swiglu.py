"""The ops `caramba::float8_swiglu` and its backward: what SwiGLU makes, in float8 without going through 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op
from caramba.ops.float8_cast import TILE, empty_cast, reference_float8_cast

Cast = tuple[Tensor, Tensor, Tensor, Tensor]


def float8_swiglu(packed: Tensor, *, per_tensor: bool = False) -> Cast:
    """Return silu(gate) * up and its transpose as `float8_cast` does, of gate and up side by side.

    Shape: packed [M, 2F], M and F multiples of 16 -> rows [M, F], row_scale [M, 1], columns [F, M],
    column_scale [F, 1]; with `per_tensor` both scales [1, 1].

    Raises:
        ConfigError: not such a matrix.
    """
    _check(packed)
    return torch.ops.caramba.float8_swiglu.default(packed, per_tensor)


def float8_swiglu_backward(
    grad: Tensor, grad_scale: Tensor, column_scale: Tensor, packed: Tensor, *, per_tensor: bool = False
) -> Cast:
    """Return the gradient of packed gate and up in float8, as `float8_cast` does.

    The incoming gradient of silu(gate) * up is grad[m, f] grad_scale[m] column_scale[f]. With `per_tensor` it is grad
    itself, and the result is e5m2.

    Shape: grad [M, F], grad_scale [M, 1], column_scale [F, 1], packed [M, 2F] -> rows [M, 2F], columns [2F, M].

    Raises:
        ConfigError: not such matrices.
    """
    _check(packed)
    if grad.shape != (packed.shape[0], packed.shape[1] // 2):
        raise ConfigError(
            f"float8_swiglu: grad is {tuple(grad.shape)} and packed {tuple(packed.shape)}, expected [M, F] and [M, 2F]"
        )
    scales = (tuple(grad_scale.shape), tuple(column_scale.shape))
    if not per_tensor and scales != ((grad.shape[0], 1), (grad.shape[1], 1)):
        raise ConfigError(
            f"float8_swiglu: grad_scale and column_scale are {scales[0]} and {scales[1]}, expected "
            f"{(grad.shape[0], 1)} and {(grad.shape[1], 1)}"
        )
    return torch.ops.caramba.float8_swiglu_backward.default(
        grad, grad_scale, column_scale, packed, per_tensor, per_tensor
    )


def _check(packed: Tensor) -> None:
    sides = packed.shape
    if (
        packed.dim() != 2
        or sides[0] % TILE
        or sides[1] % (2 * TILE)
        or not packed.numel()
        or not (packed.is_floating_point())
    ):
        raise ConfigError(
            f"float8_swiglu: packed is {packed.dtype} of shape {tuple(sides)}, expected a floating matrix with "
            f"multiples of {TILE} rows and {2 * TILE} columns"
        )


@caramba_op(
    "float8_swiglu",
    fake=lambda packed, per_tensor: empty_cast(
        packed, packed.shape[0], packed.shape[1] // 2, per_tensor, False
    ),
)
def reference_float8_swiglu(packed: Tensor, per_tensor: bool) -> Cast:
    """Compute the op in plain PyTorch."""
    gate, up = packed.float().chunk(2, dim=-1)
    return reference_float8_cast(gate * torch.sigmoid(gate) * up, per_tensor, False)


@caramba_op(
    "float8_swiglu_backward",
    fake=lambda grad, grad_scale, column_scale, packed, per_tensor, e5m2: empty_cast(
        packed, packed.shape[0], packed.shape[1], per_tensor, e5m2
    ),
)
def reference_float8_swiglu_backward(
    grad: Tensor, grad_scale: Tensor, column_scale: Tensor, packed: Tensor, per_tensor: bool, e5m2: bool
) -> Cast:
    """Compute the op in plain PyTorch."""
    wide = grad.float() if per_tensor else grad.float() * grad_scale * column_scale.t()
    gate, up = packed.float().chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    both = torch.cat((wide * up * share * (1 + gate * (1 - share)), wide * gate * share), dim=-1)
    return reference_float8_cast(both, per_tensor, e5m2)
