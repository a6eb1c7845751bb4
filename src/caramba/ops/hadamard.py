"""Hadamard rotation of the last axis: spreads an outlier over its neighbours before a block is quantised."""

from __future__ import annotations

import torch
from torch import Tensor


def hadamard(x: Tensor) -> Tensor:
    """Multiply the last axis by the orthonormal Walsh-Hadamard matrix H, in at least float32.

    H is symmetric, so it is its own inverse, and (q H) . (k H) = q . k: scores do not change when queries and keys
    both rotate, after RoPE as well. A width W that is no power of two is rotated in pieces of the largest power of
    two that divides it; an odd one stays as it is.

    Shape: [..., W] to [..., W].

    Reference: Ashkboos et al., 2024, arXiv:2404.00456 (rotation before 4-bit caches).
    """
    width = x.shape[-1]
    piece, step = width & -width, 1
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, max(piece, 1)))
    while step < piece:
        first, second = rows.unflatten(-1, (-1, 2, step)).unbind(-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return rows.flatten(-2) * max(piece, 1) ** -0.5
