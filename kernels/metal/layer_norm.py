"""Launchers of `caramba::layer_norm`, `caramba::add_layer_norm` and their backward."""

from __future__ import annotations

import torch
from caramba.kernels.metal.column_sums import Shares, column_sums
from caramba.kernels.metal.library import (
    MOST_THREADS,
    find,
    group_size,
    rows_of,
    rows_per_group,
    takes,
    type_of,
)
from torch import Tensor


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    found = _forward(x, None, weight, bias, eps)
    return NotImplemented if found is None else (found[0], *found[2:])


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = _forward(x, residual, weight, bias, eps)
    return NotImplemented if found is None else found


def _are_alike(weight: Tensor | None, bias: Tensor | None) -> bool:
    return weight is None or bias is None or weight.dtype == bias.dtype


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Return (y, sum, mean, rstd), where the sum of no residual is not written; None where there is no kernel."""
    size = group_size(x.shape[-1])
    takes_it = takes(x, weight, bias) and _are_alike(weight, bias)
    if not takes_it or x.numel() // x.shape[-1] * size > MOST_THREADS:
        return None
    library = find("layer_norm", X=type_of(x, x), W=type_of(bias if weight is None else weight, x))
    rows = rows_of(x)
    others = rows if residual is None else rows_of(residual)
    together = rows_per_group(len(rows))
    y, total = x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else 0)
    mean, rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for _ in range(2))
    vectors = [rows if vector is None else vector.contiguous() for vector in (weight, bias)]
    library.layer_norm(
        *(rows, others, *vectors, y, y if residual is None else total, mean, rstd),
        *(rows.shape[1], rows.stride(0), others.stride(0)),
        *(int(given is not None) for given in (residual, weight, bias)),
        *(float(eps), len(rows), together),
        threads=(-(-len(rows) // together) * size,),
        group_size=(size,),
    )
    return y, total, mean, rstd


def layer_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    shares = Shares.of(x)
    if shares is None or not takes(x, grad, grad_sum, weight, bias) or grad.dtype != x.dtype:
        return NotImplemented
    library = find("layer_norm_backward", X=type_of(x, x), W=type_of(weight, x), COLUMNS=shares.columns)
    slopes, rows = grad.contiguous(), x.contiguous()
    sums = slopes if grad_sum is None else grad_sum.contiguous()
    grad_x = x.new_empty(x.shape)
    rooms = [shares.room(x, vector) for vector in (weight, bias)]
    library.layer_norm_backward(
        *(slopes, sums, rows, mean.contiguous(), rstd.contiguous()),
        *(rows if weight is None else weight.contiguous(), grad_x, *rooms),
        *(shares.rows, shares.rows_per_group, shares.width),
        *(int(given is not None) for given in (grad_sum, weight, bias)),
        threads=(shares.groups * shares.size,),
        group_size=(shares.size,),
    )
    return grad_x, *(column_sums(room, vector) for room, vector in zip(rooms, (weight, bias), strict=True))
