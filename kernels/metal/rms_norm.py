"""Launchers of `caramba::rms_norm`, `caramba::add_rms_norm` and their backward."""

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


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    found = _forward(x, None, weight, eps)
    return NotImplemented if found is None else (found[0], found[2])


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    found = _forward(x, residual, weight, eps)
    return NotImplemented if found is None else found


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return (y, sum, rstd), where the sum of no residual is not written; None where there is no kernel."""
    size = group_size(x.shape[-1])
    if not takes(x, weight) or x.numel() // x.shape[-1] * size > MOST_THREADS:
        return None
    library = find("rms_norm", X=type_of(x, x), W=type_of(weight, x))
    rows = rows_of(x)
    others = rows if residual is None else rows_of(residual)
    together = rows_per_group(len(rows))
    y, total = x.new_empty(x.shape), x.new_empty(x.shape if residual is not None else 0)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    library.rms_norm(
        *(rows, others, rows if weight is None else weight.contiguous()),
        *(y, y if residual is None else total, rstd),
        *(
            rows.shape[1],
            rows.stride(0),
            others.stride(0),
            int(residual is not None),
            int(weight is not None),
        ),
        *(float(eps), len(rows), together),
        threads=(-(-len(rows) // together) * size,),
        group_size=(size,),
    )
    return y, total, rstd


def rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    shares = Shares.of(x)
    if shares is None or not takes(x, grad, grad_sum, weight) or grad.dtype != x.dtype:
        return NotImplemented
    library = find("rms_norm_backward", X=type_of(x, x), W=type_of(weight, x), COLUMNS=shares.columns)
    slopes, rows = grad.contiguous(), x.contiguous()
    sums = slopes if grad_sum is None else grad_sum.contiguous()
    grad_x = x.new_empty(x.shape)
    room = shares.room(x, weight)
    library.rms_norm_backward(
        *(slopes, sums, rows, rstd.contiguous(), rows if weight is None else weight.contiguous()),
        *(grad_x, room, shares.rows, shares.rows_per_group, shares.width),
        *(int(grad_sum is not None), int(weight is not None)),
        threads=(shares.groups * shares.size,),
        group_size=(shares.size,),
    )
    return grad_x, column_sums(room, weight)
