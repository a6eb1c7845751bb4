"""The op `caramba::rope`: rotate-half position embedding with given cosines and sines; its own backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, direct, upcast


def rope(x: Tensor, cos: Tensor, sin: Tensor, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
    """Rotate the pairs of features p and p + D/2 by their angles, times `scale`.

        y[p] = scale (x[p] cos - x[p + D/2] sin),  y[p + D/2] = scale (x[p + D/2] cos + x[p] sin)

    Computed in at least fp32 and rounded once. The gradient is the transposed map, which is the rotation by the
    opposite angle. The tables get none.

    Shape: x [B, N, T, D]; cos and sin [G, T, D/2] or [B, G, T, D/2], where G divides N and head n reads group
    n // (N / G); returns [B, N, T, D] in x's order of strides and dtype, or in `dtype`.

    Raises:
        ConfigError: shapes or devices that do not fit, what is not floating, or tables that require gradients.

    Reference: Su et al., 2021, arXiv:2104.09864.
    """
    _check(x, cos, sin)
    if dtype is not None and not dtype.is_floating_point:
        raise ConfigError(f"rope: dtype is {dtype}, expected a floating one")
    run = direct("rope", x, cos, sin) or torch.ops.caramba.rope.default
    return run(x, cos, sin, scale, False, dtype or x.dtype)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    shape, table = x.shape, cos.shape
    if x.dim() != 4 or shape[-1] % 2 or not x.is_floating_point():
        raise ConfigError(
            f"rope: x is {x.dtype} of shape {tuple(shape)}, expected floating [B, N, T, D] with even D"
        )
    fits = (
        len(table) in (3, 4)
        and table[-2:] == (shape[2], shape[3] // 2)
        and table[-3] > 0
        and shape[1] % table[-3] == 0
        and (len(table) == 3 or table[0] == shape[0])
    )
    if not fits or sin.shape != table or cos.dtype != sin.dtype or not cos.is_floating_point():
        raise ConfigError(
            f"rope: cos is {cos.dtype} {tuple(table)} and sin {sin.dtype} {tuple(sin.shape)} for x {tuple(shape)}; "
            f"expected both floating [G, {shape[2]}, {shape[3] // 2}], or the same with {shape[0]} in front, G a "
            f"divisor of {shape[1]}"
        )
    if cos.device != x.device or sin.device != x.device:
        raise ConfigError(
            f"rope: cos is on {cos.device}, sin on {sin.device}, x on {x.device}; expected one device"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ConfigError("rope: cos and sin require gradients, which this op does not give; detach them")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, cos, sin, ctx.scale, ctx.inverse, _ = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    grad_x = call_op("rope", grad, cos, sin, ctx.scale, not ctx.inverse, ctx.dtype)
    return grad_x, None, None, None, None, None


@caramba_op(
    "rope",
    fake=lambda x, cos, sin, scale, inverse, dtype: torch.empty_like(x, dtype=dtype),
    setup=_setup,
    backward=_backward,
    is_linear=True,
)
def reference_rope(
    x: Tensor, cos: Tensor, sin: Tensor, scale: float, inverse: bool, dtype: torch.dtype
) -> Tensor:
    """Compute the op in plain PyTorch."""
    repeats = x.shape[1] // cos.shape[-3]
    wide = upcast(x)
    cos, sin = (table.to(wide.dtype).repeat_interleave(repeats, -3) for table in (cos, sin))
    if inverse:
        sin = -sin
    first, second = wide.chunk(2, dim=-1)
    out = torch.empty_like(x, dtype=dtype)
    return out.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1) * scale)
