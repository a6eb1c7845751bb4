"""How a backward over rows sums its columns: some rows to a threadgroup, and then the threadgroups' shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from caramba.kernels.metal.library import MOST_THREADS, WIDEST_GROUP, find, group_size, type_of
from torch import Tensor

ROWS_PER_GROUP, MOST_COLUMNS = 128, 16
"""Rows of a threadgroup, so that shares are a small part of what is moved; columns of a thread, in registers."""


@dataclass(frozen=True)
class Shares:
    """A launch over rows: threads of a threadgroup, columns of a thread, threadgroups."""

    rows: int
    width: int
    size: int
    columns: int
    groups: int
    rows_per_group: int = ROWS_PER_GROUP

    @classmethod
    def of(cls, x: Tensor) -> Shares | None:
        """Plan for x [..., D]; None where a row is too wide for the registers, rows too many, or none."""
        width = x.shape[-1]
        if not x.numel() or width > WIDEST_GROUP * MOST_COLUMNS:
            return None
        size = group_size(width, 256 if width <= 256 * 8 else WIDEST_GROUP)
        columns = 4 if width <= 4 * size else MOST_COLUMNS
        rows = x.numel() // width
        if -(-rows // ROWS_PER_GROUP) * size > MOST_THREADS:
            return None
        return cls(rows, width, size, columns, -(-rows // ROWS_PER_GROUP))

    def room(self, x: Tensor, vector: Tensor | None) -> Tensor:
        """Return memory for the shares of a vector's gradient, [groups, D], nothing where there is no vector."""
        shape = (self.groups if vector is not None else 0, self.width)
        return torch.empty(shape, dtype=torch.float32, device=x.device)


def column_sums(shares: Tensor, vector: Tensor | None) -> Tensor:
    """Return the sums of columns in the vector's dtype; empty where there is no vector."""
    if vector is None:
        return shares.new_empty(0)
    library = find("column_sums", W=type_of(vector, vector))
    sums = vector.new_empty(vector.shape)
    n_shares, width = shares.shape
    library.column_sums(shares, sums, n_shares, width, threads=(width,), group_size=(group_size(width),))
    return sums
