"""Kernel and launcher of `caramba::dba_append`: one program writes a token of a head, all its streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from caramba.kernels.triton.launch import Launch
from caramba.kernels.triton.signature import LaunchCache
from caramba.kernels.triton.store_plan import MOST_STREAMS, StorePlan, along_width, columns_of
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _copy(x, into, is_inside, D: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    value = tl.load(x + d, mask=is_inside & (d < D), other=0.0)
    tl.store(into + d, value.to(into.dtype.element_ty), mask=is_inside & (d < D))


@triton.jit
def _turn(x, into, cos, sin, is_inside, D: tl.constexpr, BLOCK: tl.constexpr):
    HALF: tl.constexpr = D // 2
    p = tl.arange(0, BLOCK // 2)
    mask = is_inside & (p < HALF)
    c = tl.load(cos + p, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + p, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(x + p, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + HALF + p, mask=mask, other=0.0).to(tl.float32)
    # Rounded to the stream's own type first, as where the rotation is an op of its own.
    low = (first * c - second * s).to(x.dtype.element_ty)
    high = (second * c + first * s).to(x.dtype.element_ty)
    tl.store(into + p, low.to(into.dtype.element_ty), mask=mask)
    tl.store(into + HALF + p, high.to(into.dtype.element_ty), mask=mask)


# Where a row ends is only compared with: one kernel serves caches of every length.
@triton.jit(do_not_specialize=["capacity"])
def _append(
    x0, x1, x2, into0, into1, into2, lengths, cos, sin,
    x0_b, x0_k, x0_t, x1_b, x1_k, x1_t, x2_b, x2_k, x2_t,
    i0_b, i0_k, i0_s, i1_b, i1_k, i1_s, i2_b, i2_k, i2_s,
    table_b, group, n_tokens, capacity,
    C0: tl.constexpr, C1: tl.constexpr, C2: tl.constexpr,
    D0: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    ROTATED: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write the streams of width D (0: none), each at column C of its buffer; P is D's next power of two."""
    b = (tl.program_id(0) // n_tokens).to(tl.int64)
    t = (tl.program_id(0) % n_tokens).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    place = tl.load(lengths + b).to(tl.int64) + t
    is_inside = (place >= 0) & (place < capacity)
    table = b * table_b + ((head // group) * n_tokens + t) * PAIRS
    x0 += b * x0_b + head * x0_k + t * x0_t
    into0 += b * i0_b + head * i0_k + place * i0_s + C0
    if ROTATED == 0:
        _turn(x0, into0, cos + table, sin + table, is_inside, D0, P0)
    else:
        _copy(x0, into0, is_inside, D0, P0)
    if D1:
        x1 += b * x1_b + head * x1_k + t * x1_t
        into1 += b * i1_b + head * i1_k + place * i1_s + C1
        if ROTATED == 1:
            _turn(x1, into1, cos + table, sin + table, is_inside, D1, P1)
        else:
            _copy(x1, into1, is_inside, D1, P1)
    if D2:
        x2 += b * x2_b + head * x2_k + t * x2_t
        into2 += b * i2_b + head * i2_k + place * i2_s + C2
        if ROTATED == 2:
            _turn(x2, into2, cos + table, sin + table, is_inside, D2, P2)
        else:
            _copy(x2, into2, is_inside, D2, P2)


def dba_append(
    streams: list[Tensor],
    buffers: list[Tensor],
    lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotated: int,
    admit: Callable[..., None] | None = None,
) -> None:
    """Run the op; everything but the places is decided by shapes, so nothing waits for the device.

    `admit` is called with the arguments first when their form is a new one, and refuses what the op does not take.
    """
    tables = () if cos is None or sin is None else (cos, sin)
    given: Sequence[Tensor] = (*streams, *buffers, lengths, *tables)
    rest = rotated, len(streams), len(buffers), cos is None, sin is None
    plan = _plans.get(rest, given)
    if plan is None:
        if admit is not None:
            admit(streams, buffers, lengths, cos, sin, rotated)
        plan = _planned(streams, buffers, lengths, cos, sin, rotated)
        _plans.add(rest, given, plan)
    plan.run(given)


_plans: LaunchCache[StorePlan] = LaunchCache()


def _planned(
    streams: list[Tensor],
    buffers: list[Tensor],
    lengths: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    rotated: int,
) -> StorePlan:
    """Lay out calls of this form."""
    n = len(streams)
    if n > MOST_STREAMS or torch.float64 in {x.dtype for x in (*streams, *buffers)}:
        raise ValueError(
            f"dba_append: streams: got {[str(x.dtype) for x in streams]} into {[str(x.dtype) for x in buffers]}, "
            f"expected at most {MOST_STREAMS}, of 16 or 32 bits, on a GPU"
        )
    batch, heads, n_tokens = streams[0].shape[:3]
    if not batch * heads * n_tokens:
        return StorePlan()
    xs = [along_width(x) for x in streams]
    widths = [x.shape[-1] for x in xs]
    places, starts = (list(found) for found in zip(*columns_of(streams, buffers), strict=True))
    fill = MOST_STREAMS - n
    into = [buffers[place] for place in places]
    xs, into = xs + xs[:1] * fill, into + into[:1] * fill
    widths, starts = widths + [0] * fill, starts + [0] * fill
    groups = heads if cos is None else cos.shape[-3]
    pairs = widths[rotated] // 2 if rotated >= 0 else 1
    scalars = [
        *(s for x in xs for s in x.stride()[:3]),
        *(s for x in into for s in x.stride()[:3]),
        groups * n_tokens * pairs if cos is not None and cos.dim() == 4 else 0,
        heads // groups,
        n_tokens,
        min(x.shape[2] for x in buffers),
        *starts,
        *widths,
        *(max(2, 1 << max(width - 1, 0).bit_length()) for width in widths),
        rotated,
        pairs,
    ]
    n_warps = 4 if max(widths) > 256 else 1
    launch = Launch(_append, (batch * n_tokens, heads), scalars, {}, num_warps=n_warps)
    at = n + len(buffers)
    tables = () if cos is None or sin is None else (cos, sin)
    copied = [i for i, x in enumerate(streams) if x.stride(-1) != 1]
    copied += [
        at + i
        for i, x in enumerate((lengths, *tables))
        if not x.is_contiguous()  # which the kernel reads one after the other
    ]
    return StorePlan(
        launch=launch,
        order=(
            *(*range(n), *[0] * fill),
            *(*(n + place for place in places), *[n + places[0]] * fill),
            *(at, *((at + 1, at + 2) if tables else (at, at))),
        ),
        copied=tuple(copied),
    )
