"""Float8: a matrix and its transpose, and SwiGLU whose result is cast, scaled by rows or as a whole."""

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op

LEAST_AMAX = 1e-12  # of what a scale is made for, as in torchao
TILE = 16  # of both sides of a float8 product, which the hardware's are made of


def float8_cast(x: Tensor, *, per_tensor: bool = False, e5m2: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x and its transpose in float8, each with what undoes its scale: x[m, n] is about

        rows[m, n] row_scale[m] = columns[n, m] column_scale[n]

    A scale takes the largest magnitude of a row of x, or of a column for the transpose, to at most the largest of the
    format, and is a power of two; with `per_tensor` there is one for all of x, which is none. Where x is not finite, so
    is what it becomes.

    Shape: x [M, N], M and N multiples of 16 -> rows [M, N], row_scale [M, 1], columns [N, M], column_scale [N, 1];
    with `per_tensor` both scales [1, 1]. dtype: float8_e4m3fn, or float8_e5m2, and scales in float32.

    Raises:
        ConfigError: not such a matrix.

    Reference: Micikevicius et al., 2022, arXiv:2209.05433.
    """
    if x.dim() != 2 or not x.is_floating_point() or x.shape[0] % TILE or x.shape[1] % TILE or not x.numel():
        raise ConfigError(
            f"float8_cast: x is {x.dtype} of shape {tuple(x.shape)}, expected a floating matrix with both sides "
            f"multiples of {TILE}"
        )
    return torch.ops.caramba.float8_cast.default(x, per_tensor, e5m2)


def format_of(e5m2: bool) -> torch.dtype:
    """Return the format: three bits of mantissa, or two and a wider range."""
    return torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn


@caramba_op("float8_cast", fake=lambda x, per_tensor, e5m2: empty_cast(x, x.shape[0], x.shape[1], per_tensor, e5m2))
def reference_float8_cast(x: Tensor, per_tensor: bool, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    wide, dtype = x.float(), format_of(e5m2)
    if per_tensor:
        scale = _scale(_amax(wide).reshape(1, 1), dtype)
        cast = _cast(wide * scale, dtype)
        return cast, scale.reciprocal(), cast.t().contiguous(), scale.reciprocal()
    by_row, by_column = (_power_of_two(_scale(_amax(wide, dim), dtype)) for dim in (1, 0))
    columns = _cast(wide * by_column, dtype).t().contiguous()
    return _cast(wide * by_row, dtype), by_row.reciprocal(), columns, by_column.reciprocal().t().contiguous()


def _amax(wide: Tensor, dim: int | None = None) -> Tensor:
    """The largest magnitude, NaN left out: it stays NaN in its own place, and need not be in others."""
    known = wide.abs().nan_to_num(nan=0.0, posinf=torch.inf)
    return (known.amax() if dim is None else known.amax(dim, keepdim=True)).clamp(min=LEAST_AMAX)


def _scale(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """What takes a magnitude to the largest of a format, rounded once: a number over a tensor is its reciprocal times
    the number, rounded twice, and torchao, which divides in float64, rounds to the same as one division."""
    return torch.full_like(amax, torch.finfo(dtype).max) / amax


def _power_of_two(scale: Tensor) -> Tensor:
    """Round a scale down to a power of two: its bits without those of the mantissa."""
    return (scale.view(torch.int32) & 0x7F800000).view(torch.float32)


def _cast(scaled: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast with saturation: what a rounded scale took beyond the largest number becomes that; NaN stays."""
    most = torch.finfo(dtype).max
    return scaled.clamp(-most, most).to(dtype)


def empty_cast(like: Tensor, m: int, n: int, per_tensor: bool, e5m2: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the cast of a matrix [M, N] is written to."""
    dtype = format_of(e5m2)
    n_rows, n_columns = (1, 1) if per_tensor else (m, n)
    return (
        like.new_empty((m, n), dtype=dtype),
        like.new_empty((n_rows, 1), dtype=torch.float32),
        like.new_empty((n, m), dtype=dtype),
        like.new_empty((n_columns, 1), dtype=torch.float32),
    )


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
    fake=lambda packed, per_tensor: empty_cast(packed, packed.shape[0], packed.shape[1] // 2, per_tensor, False),
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
