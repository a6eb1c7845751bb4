"""Launcher of `caramba::rope`."""

from __future__ import annotations

import torch
from caramba.kernels.metal.library import MOST_THREADS, TYPES, find, group_size, takes, type_of
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor, scale: float, inverse: bool, dtype: torch.dtype) -> Tensor:
    batch, n_heads, n_tokens, width = x.shape
    groups = cos.shape[-3]
    # Tables of each sequence have threadgroups of their own; tables for all are read once.
    tables, together = (batch, 1) if cos.dim() == 4 else (1, batch)
    pairs = together * (n_heads // groups) * (width // 2)
    size = group_size(pairs)
    if not takes(x, cos) or dtype not in TYPES or max(pairs, n_tokens * size) > MOST_THREADS:
        return NotImplemented
    library = find("rope", X=type_of(x, x), TABLE=type_of(cos, cos), Y=TYPES[dtype])
    y = torch.empty_like(x, dtype=dtype)
    cos, sin = cos.contiguous(), sin.contiguous()
    strides = (cos.stride(0) if cos.dim() == 4 else 0, cos.stride(-3))
    library.rope(
        *(x, cos, sin, y, width // 2, n_heads // groups, together),
        *(*x.stride(), *y.stride(), *strides, float(scale), -1.0 if inverse else 1.0),
        threads=(n_tokens * size, groups, tables),
        group_size=(size, 1, 1),
    )
    return y
