"""Products of a decode step's few rows: those of a model of a billion weights, by the op and by torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from cases.kernel_case import COLD_BYTES, Side
from timing import interleave
from torch import Tensor

from caramba.lower.quantize.int4 import group_of, quantize_int4
from caramba.ops.packed_int4 import WORDS, dequantize_int4
from caramba.ops.small_batch_linear import small_batch_linear


@dataclass(frozen=True)
class Shape:
    """One product of a block: rows of the result, width, and what runs in the same pass."""

    name: str
    n_out: int
    width: int
    is_gated: bool = False
    is_normed: bool = False
    has_residual: bool = False

    @property
    def n_rows(self) -> int:
        """Rows of the weight."""
        return self.n_out * (2 if self.is_gated else 1)


SHAPES = {
    "1b": (
        Shape("queries, keys, values", 3072, 2048, is_normed=True),
        Shape("out", 2048, 2048, has_residual=True),
        Shape("gate, up", 8192, 2048, is_gated=True, is_normed=True),
        Shape("down", 2048, 8192, has_residual=True),
        Shape("head", 128256, 2048),
    ),
    "tiny": (Shape("gate, up", 8, 512, is_gated=True, is_normed=True),),
}


Given = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]
"""x, weight, its scale if it is codes, residual and norm."""


def made(shape: Shape, rows: int, dtype: torch.dtype, device: torch.device, *, bits: int = 16) -> Given:
    """Return what a product is of: a weight of the dtype, or its codes of 8 bits or 4."""

    def random_tensor(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device)

    weight, scale = random_tensor(shape.n_rows, shape.width) * shape.width**-0.5, None
    if bits == 4:
        group = group_of(shape.width)
        assert group is not None
        weight, scale = quantize_int4(weight, group)
    elif bits == 8:
        scale = weight.float().abs().amax(1) / 127
        weight = (weight / scale[:, None]).round().to(torch.int8)
    return (
        random_tensor(rows, shape.width),
        weight,
        scale,
        random_tensor(rows, shape.n_out),
        random_tensor(shape.width),
    )


def numbers_of(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight that codes stand for."""
    if scale is not None and weight.dtype == WORDS:
        return dequantize_int4(weight, scale, dtype)
    return (
        weight
        if scale is None
        else (weight * scale[:, None].to(torch.promote_types(dtype, scale.dtype))).to(dtype)
    )


def ours(shape: Shape) -> Callable[..., Tensor]:
    """Return the op on what `made` returns."""

    def call(x: Tensor, weight: Tensor, scale: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
        return small_batch_linear(
            x,
            weight,
            scale=scale,
            residual=residual if shape.has_residual else None,
            norm=norm if shape.is_normed else None,
            eps=1e-5 if shape.is_normed else None,
            gated=shape.is_gated,
        )

    return call


def by_torch(shape: Shape) -> Callable[..., Tensor]:
    """Return the same by torch's own calls."""

    def call(x: Tensor, weight: Tensor, scale: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
        if shape.is_normed:
            x = F.rms_norm(x, (shape.width,), norm, 1e-5)
        y = alone(x, weight, scale, residual, norm)
        if shape.is_gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y + residual if shape.has_residual else y

    return call


def alone(x: Tensor, weight: Tensor, scale: Tensor | None, residual: Tensor, norm: Tensor) -> Tensor:
    """Return the library's product alone.

    torchao multiplies codes of 8 bits; codes of 4 bits use a weight made for it.
    """
    if scale is not None and weight.dtype == WORDS:
        return F.linear(x, dequantize_int4(weight, scale, x.dtype))
    return F.linear(x, weight) if scale is None else (F.linear(x, weight.to(x.dtype)) * scale).to(x.dtype)


def n_sets(n_bytes: int, device: torch.device) -> int:
    """Return how many weights together exceed the cache."""
    return min(max(2, -(-COLD_BYTES // n_bytes)), 64) if device.type == "cuda" else 1


def time_products(sides: dict[str, Side], seconds: float) -> dict[str, float]:
    """Return the median microseconds of every side, which take turns."""
    times = interleave(
        {name: side.seconds for name, side in sides.items()}, repeats=3, warm=2, seconds=seconds
    )
    return {name: 1e6 * statistics.median(values) for name, values in times.items()}


def bytes_of(shape: Shape, dtype: torch.dtype, bits: int) -> int:
    """Return the bytes of a weight, with scales and zeros of groups."""
    n = shape.n_rows * shape.width
    return (
        n // 2 + 4 * n // (group_of(shape.width) or n)
        if bits == 4
        else n * (dtype.itemsize if bits == 16 else 1)
    )
