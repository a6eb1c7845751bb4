"""Many tensors in one launch: a table of addresses, and for each program its tensor and its place in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

import triton.language as tl

BLOCK, WARPS = 2048, 8
KEPT = 16
"""Tables kept for lists of tensors seen last: gradients mostly come back to the addresses that they had."""
TYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}
_tables: dict[Hashable, Tensor] = {}
_places: dict[Hashable, Tensor] = {}


def table_of(rows: Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    """Return rows of addresses and sizes, [N, columns] int64, on a device, without waiting for it."""
    key = (device.type, device.index, tuple(rows))
    if key not in _tables:
        table = torch.tensor(rows, dtype=torch.int64)
        # Pinned: torch keeps the memory until the copy is done.
        table = table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
        _keep(_tables, key, table)
    else:
        _tables[key] = _tables.pop(key)  # seen last
    return _tables[key]


def places_of(sizes: Sequence[int], device: torch.device, block: int = BLOCK) -> Tensor:
    """Return the tensor and the block of `block` in it of every program, [programs, 2] int32; of empty tensors none."""
    key = (device.type, device.index, block, tuple(sizes))
    if key not in _places:
        counts = torch.tensor([-(-size // block) for size in sizes])
        index = torch.repeat_interleave(torch.arange(len(sizes)), counts)
        first = counts.cumsum(0) - counts
        places = torch.stack((index, torch.arange(len(index)) - first[index]), dim=1)
        _keep(_places, key, places.to(torch.int32).contiguous().to(device))
    else:
        _places[key] = _places.pop(key)
    return _places[key]


def forget() -> None:
    """Drop what was made for lists seen before, as when blocks are of another size."""
    _tables.clear()
    _places.clear()


def are_aligned(addresses: Sequence[int]) -> bool:
    """Whether all are multiples of 16 bytes, as wide loads need."""
    together = 0
    for address in addresses:
        together |= address
    return together % 16 == 0


def _keep(kept: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    kept[key] = value
    if len(kept) > KEPT:
        del kept[next(iter(kept))]  # not seen for longest
