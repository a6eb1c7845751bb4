"""The 2-norm of each of many tensors: sums of squares of chunks in one launch, of chunks of a tensor in another."""

from __future__ import annotations

import torch
from caramba.kernels.triton.multi_tensor import TYPES, are_aligned, places_of, table_of
from torch import Tensor

import triton
import triton.language as tl

BLOCK, ROUNDS, WARPS = 4096, 8, 8
"""A program adds up ROUNDS blocks."""
PARTS = 1024  # sums of chunks that are added up at a time
COLUMNS = tl.constexpr(4)
"""Of the table: address, size, first chunk, chunks."""


@triton.jit
def _list_norms_chunks(
    table_ptr,
    place_ptr,
    sum_ptr,
    G: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROUNDS_N: tl.constexpr,
):
    place = place_ptr + tl.program_id(0) * 2
    entry = table_ptr + tl.load(place) * COLUMNS
    chunk = tl.load(place + 1).to(tl.int64)
    g_ptr = tl.load(entry).to(tl.pointer_type(G))
    if ALIGNED:
        g_ptr = tl.multiple_of(g_ptr, 16)
    size = tl.load(entry + 1)
    total = tl.zeros([BLOCK_N], tl.float32)
    start = chunk * (BLOCK_N * ROUNDS_N)
    if ALIGNED and start + BLOCK_N * ROUNDS_N <= size:
        for i in tl.static_range(ROUNDS_N):
            g = tl.load(g_ptr + start + i * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.float32)
            total += g * g
    else:
        for j in range(ROUNDS_N):
            at = start + j * BLOCK_N + tl.arange(0, BLOCK_N)
            x = tl.load(g_ptr + at, mask=at < size, other=0.0).to(tl.float32)
            total += x * x
    tl.store(sum_ptr + tl.program_id(0), tl.sum(total))


@triton.jit
def _list_norms_sum(table_ptr, sum_ptr, out_ptr, BLOCK_N: tl.constexpr):
    entry = table_ptr + tl.program_id(0) * COLUMNS
    first, count = tl.load(entry + 2), tl.load(entry + 3)
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(0, count, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        total += tl.load(sum_ptr + first + at, mask=at < count, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.sqrt(tl.sum(total)))


def foreach_norm(tensors: list[Tensor]) -> Tensor:
    kinds: dict[torch.dtype, list[int]] = {}
    for index, x in enumerate(tensors):
        if not x.is_contiguous() or x.dtype not in TYPES or x.dtype == torch.float64:
            raise ValueError(
                f"foreach_norm: a tensor of shape {tuple(x.shape)} and {x.dtype} is not contiguous, or float64"
            )
        kinds.setdefault(x.dtype, []).append(index)
    device, found = tensors[0].device, []
    chunk = BLOCK * ROUNDS
    with torch.cuda.device_of(tensors[0]):
        for dtype, indices in kinds.items():
            sizes = [tensors[index].numel() for index in indices]
            rows, first = [], 0
            for index, size in zip(indices, sizes, strict=True):
                chunks = -(-size // chunk)
                rows.append((tensors[index].data_ptr(), size, first, chunks))
                first += chunks
            table, places = table_of(rows, device), places_of(sizes, device, chunk)
            sums = torch.empty(first, dtype=torch.float32, device=device)
            norms = torch.empty(len(rows), dtype=torch.float32, device=device)
            if first:
                is_aligned = are_aligned([row[0] for row in rows])
                _list_norms_chunks[(first,)](
                    table, places, sums, TYPES[dtype], is_aligned, BLOCK, ROUNDS, num_warps=WARPS
                )
            _list_norms_sum[(len(rows),)](table, sums, norms, PARTS)
            found.append(norms)
    if len(found) == 1:
        return found[0]
    order = sorted(range(len(tensors)), key=[index for indices in kinds.values() for index in indices].__getitem__)
    # As a table, which is made once for a list and for which nobody waits.
    return torch.cat(found)[table_of([(place,) for place in order], device)[:, 0]]
