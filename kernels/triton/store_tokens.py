"""Kernel and launcher of `caramba::store_tokens`: one program writes a token, its heads in all streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from caramba.kernels.triton.launch import Launch, power_of_2
from caramba.kernels.triton.signature import LaunchCache
from caramba.kernels.triton.store_plan import MOST_STREAMS, StorePlan, along_width, columns_of
from torch import Tensor

import triton
import triton.language as tl

TILE = 2048
"""Numbers of a stream in a program; more heads than fit are for others."""
NUMBERS_PER_WARP = 256
"""A thread then loads 16 bytes of a stream, if its numbers have 16 bits."""


@triton.jit
def _loaded(x, t, block, x_k, x_t, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """Return a block of heads of a token, [HEADS, WIDTH]."""
    head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    return tl.load(x + t * x_t + head * x_k + d, mask=(head < K) & (d < D), other=0.0)


@triton.jit
def _store(
    value, into, block, row, place, is_inside, i_b, i_k, i_s,
    C: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    d = tl.arange(0, WIDTH)[None, :]
    into += row * i_b + place * i_s + C
    mask = is_inside & (head < K) & (d < D)
    tl.store(into + head * i_k + d, value.to(into.dtype.element_ty), mask=mask)


# What rows and places are only compared with: one kernel serves caches of every size.
@triton.jit(do_not_specialize=["n_rows", "capacity"])
def _store_tokens(
    x0, x1, x2, into0, into1, into2, rows, places,
    x0_k, x0_t, x1_k, x1_t, x2_k, x2_t,
    i0_b, i0_k, i0_s, i1_b, i1_k, i1_s, i2_b, i2_k, i2_s,
    n_rows, capacity,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    H0: tl.constexpr, H1: tl.constexpr, H2: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    """Write streams of K heads of width D (0: no stream) at column C of their buffers, in tiles of H heads by P."""
    t, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, place = tl.load(rows + t), tl.load(places + t)
    # All is read before anything is written, as no read goes ahead of a write that might change what it reads.
    value0 = _loaded(x0, t, block, x0_k, x0_t, K0, D0, H0, P0)
    if D1:
        value1 = _loaded(x1, t, block, x1_k, x1_t, K1, D1, H1, P1)
    if D2:
        value2 = _loaded(x2, t, block, x2_k, x2_t, K2, D2, H2, P2)
    is_inside = (row >= 0) & (row < n_rows) & (place >= 0) & (place < capacity)
    _store(value0, into0, block, row, place, is_inside, i0_b, i0_k, i0_s, C0, K0, D0, H0, P0)
    if D1:
        _store(value1, into1, block, row, place, is_inside, i1_b, i1_k, i1_s, C1, K1, D1, H1, P1)
    if D2:
        _store(value2, into2, block, row, place, is_inside, i2_b, i2_k, i2_s, C2, K2, D2, H2, P2)


def store_tokens(
    streams: list[Tensor],
    buffers: list[Tensor],
    rows: Tensor,
    places: Tensor,
    admit: Callable[..., None] | None = None,
) -> None:
    """Run the op; everything but rows and places is decided by shapes, so nothing waits for the device.

    `admit` is called with the arguments first when their form is a new one, and refuses what the op does not take.
    """
    given: Sequence[Tensor] = (*streams, *buffers, rows, places)
    rest = len(streams), len(buffers)
    plan = _plans.get(rest, given)
    if plan is None:
        if admit is not None:
            admit(streams, buffers, rows, places)
        plan = _planned(streams, buffers, rows, places)
        _plans.add(rest, given, plan)
    plan.run(given)


_plans: LaunchCache[StorePlan] = LaunchCache()


@dataclass(frozen=True)
class _Part:
    """A stream, where it goes, and the tile in which a program takes it."""

    index: int
    x: Tensor
    buffer: int
    column: int

    @property
    def n_heads(self) -> int:
        return self.x.shape[1]

    @property
    def width(self) -> int:
        return self.x.shape[3]

    @property
    def tile(self) -> tuple[int, int]:
        wide = power_of_2(self.width)
        return min(power_of_2(self.n_heads), max(1, TILE // wide)), wide


def _planned(streams: list[Tensor], buffers: list[Tensor], rows: Tensor, places: Tensor) -> StorePlan:
    """Lay out calls of this form."""
    dtypes = [x.dtype for x in (*streams, *buffers)]
    if len(streams) > MOST_STREAMS or torch.float64 in dtypes:
        raise ValueError(
            f"store_tokens: streams, buffers: got {len(streams)} and {', '.join(map(str, dtypes))}, "
            f"expected at most {MOST_STREAMS} streams, of 16 or 32 bits, on a GPU"
        )
    n_tokens, (n_rows, _, capacity, _) = streams[0].shape[2], buffers[0].shape
    parts = [
        _Part(index, along_width(x), *place)
        for index, (x, place) in enumerate(zip(streams, columns_of(streams, buffers), strict=True))
        if x.numel()
    ]
    if not (parts and n_rows and capacity):
        return StorePlan()
    tiles = [part.tile for part in parts]
    n_blocks = max(-(-part.n_heads // heads) for part, (heads, _) in zip(parts, tiles, strict=True))
    n_warps = min(8, max(1, max(heads * wide for heads, wide in tiles) // NUMBERS_PER_WARP))
    fill = MOST_STREAMS - len(parts)
    filled, tiles = parts + parts[:1] * fill, tiles + tiles[:1] * fill
    scalars = [
        *(stride for part in filled for stride in part.x.stride()[1:3]),
        *(stride for part in filled for stride in buffers[part.buffer].stride()[:3]),
        *(n_rows, capacity),
        *(part.column for part in filled),
        *(part.n_heads for part in filled),
        *(*(part.width for part in parts), *[0] * fill),
        *(heads for heads, _ in tiles),
        *(wide for _, wide in tiles),
    ]
    n = len(streams)
    ids = n + len(buffers)
    return StorePlan(
        launch=Launch(_store_tokens, (n_tokens, n_blocks), scalars, {}, num_warps=n_warps),
        order=(*(part.index for part in filled), *(n + part.buffer for part in filled), ids, ids + 1),
        copied=(
            *(i for i, x in enumerate(streams) if x.stride(-1) != 1),
            *(ids + i for i, x in enumerate((rows, places)) if not x.is_contiguous()),
        ),
    )
