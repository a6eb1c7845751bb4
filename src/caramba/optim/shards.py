"""Tensors of which each rank holds a part: their parts here, and sums of squares over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; asked without importing what defines it."""
    return type(tensor) not in PLAIN and hasattr(tensor, "to_local")


def local(tensor: Any) -> Tensor:
    """Return the part of a tensor that is on this rank, which shares its memory; of a plain tensor itself."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def complete_squares(squares: Tensor, tensors: Sequence[Any]) -> Tensor:
    """Return the sums of squares of whole tensors, [n], from those of the parts here, [n].

    A dimension of the mesh over which a tensor is the same everywhere adds nothing. Ranks have the same tensors in the
    same order.
    """
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        if not is_sharded(tensor):
            continue
        for dim, placement in enumerate(tensor.placements):
            if not placement.is_replicate() and tensor.device_mesh.size(dim) > 1:
                places.setdefault((tensor.device_mesh, dim), []).append(place)
    for (mesh, dim), own in places.items():
        index = torch.tensor(own, device=squares.device)
        part = squares[index]
        dist.all_reduce(part, group=mesh.get_group(dim))
        squares = squares.index_copy(0, index, part)
    return squares


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of every rank's values, on all ranks, in place."""
    dist.all_reduce(values)
    return values


def of_rank_0(value: Tensor) -> Tensor:
    """Return rank 0's value on all ranks, in place, without waiting for the device."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(value, src=0)
    return value
