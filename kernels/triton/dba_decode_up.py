"""Kernels and launcher of `caramba::dba_decode_up`: splits are joined and mapped to a head's values in one launch.

A program makes some columns of one head. It joins all that the head read of the latent itself, as others of that head
do: the output of a few splits is in L2, and to read it again costs less than another launch and its wait. Of more splits
products on tensor cores make the sums, and of many it costs more: they are joined in a launch of their own. All reads
of a program are in flight at once, the map's among them; one split after the other took longer than two launches do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import caramba.kernels.triton.dba_decode as decode
import torch
from caramba.kernels.triton.dba_decode import DecodePlan, arguments
from caramba.kernels.triton.launch import Launch, power_of_2
from caramba.kernels.triton.pdl import pdl_options
from caramba.kernels.triton.per_head_linear import per_head_linear
from torch import Tensor

import triton
import triton.language as tl

COLUMNS = 16, 32
"""Columns of a program of one row, and of one of several: of 32 heads of 64 features these make 128 and, of 32 rows,
128 programs."""
BLOCK_T = 16
MOST_OF_ROWS = 32768
"""Numbers that the registers of a program of several rows hold."""
MOST_LANES = 512
"""Heads of all rows up to which programs of one row each read the map again; with more, two launches take less."""
MOST_ELEMENTS = 8192
"""Numbers of all splits of a row and head that a program of one row reads."""
PER_THREAD = 64
"""Those of a thread, with four warps or as many more as it takes."""
MOST_OF_MANY = 20480
"""The same of one row alone that is joined and mapped by products on tensor cores: 160 splits of 128 numbers. On an H200,
in a chain of a layer's kernels, 132 splits took 1.2 us less than with two launches, and 264 took 17 us more."""
COLUMNS_OF_MANY = 64
MOST_READ = 2**20
"""Numbers of splits that all programs of one row read together. On an H200 decode of one sequence by 32 heads, as 128
programs that sum over threads, took 1% longer than with two launches with 132 splits of 128 numbers (2.2 million), and
15% with 264."""


@triton.jit
def _up_row(
    parts,
    part_sums,
    up,
    y,
    n_splits,
    n_queries,
    n_heads,
    R: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row of one head. The splits are a power of two and up to MORE others, so that few places stay empty."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    row = tl.program_id(1).to(tl.int64)
    lane = ((row // n_queries * n_heads + head) * n_queries + row % n_queries) * n_splits
    split, feature = tl.arange(0, SPLITS), tl.arange(0, BLOCK_R)
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rank, in_width = feature < R, column < D
    # All reads before anything that waits for one of them, the map's while splits may still end.
    up_at = up + head.to(tl.int64) * (R * D) + feature[:, None] * D + column[None, :]
    weight = tl.load(up_at, in_rank[:, None] & in_width[None, :], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    read_at = parts + (lane + split)[:, None] * R + feature[None, :]
    read = tl.load(read_at, (split >= 0)[:, None] & in_rank[None, :], other=0.0)
    l = tl.load(part_sums + lane + split)
    if MORE:
        other = SPLITS + tl.arange(0, MORE)
        other_at = parts + (lane + other)[:, None] * R + feature[None, :]
        more = tl.load(other_at, (other < n_splits)[:, None] & in_rank[None, :], other=0.0)
        l_more = tl.load(part_sums + lane + other, other < n_splits, other=-float("inf"))
    top = tl.max(l, 0)
    if MORE:
        top = tl.maximum(top, tl.max(l_more, 0))
    top = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf where nothing has been read
    share = tl.exp2(l - top)
    total = tl.sum(share, 0)
    x = tl.sum(read.to(tl.float32) * share[:, None], 0)
    if MORE:
        share = tl.exp2(l_more - top)
        total += tl.sum(share, 0)
        x += tl.sum(more.to(tl.float32) * share[:, None], 0)
    x = x / tl.where(total > 0, total, 1.0)
    # Rounded as where what is read goes through memory, maps to the dtype of what they meet.
    x = x.to(DTYPE).to(tl.float32)
    out = tl.sum(x[:, None] * weight.to(DTYPE).to(tl.float32), 0)
    tl.store(y + (row * n_heads + head) * D + column, out.to(DTYPE), in_width)


@triton.jit
def _twofold(share, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """Return weights as sums of two numbers of 16 bits, one would lose digits; both in ROWS equal rows."""
    high = share.to(DTYPE)
    low = (share - high.to(tl.float32)).to(DTYPE)
    shape: tl.constexpr = (ROWS, share.shape[0])
    return tl.broadcast_to(high[None, :], shape), tl.broadcast_to(low[None, :], shape)


@triton.jit
def _up_many(
    parts,
    part_sums,
    up,
    y,
    n_splits,
    n_heads,
    R: tl.constexpr,
    D: tl.constexpr,
    SPLITS: tl.constexpr,
    MORE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """The only row of one head that many splits have read, joined and mapped by products on tensor cores: sums over
    threads take longer. A product's other rows are the same."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    ROWS: tl.constexpr = 16
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    lane = head.to(tl.int64) * n_splits
    split, other, feature = tl.arange(0, SPLITS), SPLITS + tl.arange(0, MORE), tl.arange(0, BLOCK_R)
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)
    is_other, in_rank, in_width = other < n_splits, feature < R, column < D
    # All reads before anything that waits for one of them, the map's while splits may still end.
    up_at = up + head.to(tl.int64) * (R * D) + feature[:, None] * D + column[None, :]
    weight = tl.load(up_at, in_rank[:, None] & in_width[None, :], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    read_at = parts + (lane + split)[:, None] * R + feature[None, :]
    read = tl.load(read_at, (split >= 0)[:, None] & in_rank[None, :], other=0.0)
    other_at = parts + (lane + other)[:, None] * R + feature[None, :]
    more = tl.load(other_at, is_other[:, None] & in_rank[None, :], other=0.0)
    l = tl.load(part_sums + lane + split)
    l_more = tl.load(part_sums + lane + other, is_other, other=-float("inf"))
    top = tl.maximum(tl.max(l, 0), tl.max(l_more, 0))
    top = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf where nothing has been read
    share, share_more = tl.exp2(l - top), tl.exp2(l_more - top)
    total = tl.sum(share, 0) + tl.sum(share_more, 0)
    inverse = 1.0 / tl.where(total > 0, total, 1.0)
    high, low = _twofold(share * inverse, DTYPE, ROWS)
    x = tl.dot(low, read, tl.dot(high, read))
    high, low = _twofold(share_more * inverse, DTYPE, ROWS)
    x = tl.dot(low, more, tl.dot(high, more, x))
    out = tl.dot(x.to(DTYPE), weight.to(DTYPE))
    is_first = tl.arange(0, ROWS) == 0
    y_at = y + head.to(tl.int64) * D + column[None, :] + is_first[:, None] * 0
    tl.store(y_at, out.to(DTYPE), is_first[:, None] & in_width[None, :])


@triton.jit
def _up_rows(
    parts,
    part_sums,
    up,
    y,
    n_rows,
    n_queries,
    n_heads,
    R: tl.constexpr,
    D: tl.constexpr,
    N_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Several rows of one head, with a product on tensor cores."""
    DTYPE: tl.constexpr = y.dtype.element_ty
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = row < n_rows
    lane = ((row // n_queries * n_heads + head) * n_queries + row % n_queries).to(tl.int64) * N_SPLITS
    split, feature = tl.arange(0, SPLITS), tl.arange(0, BLOCK_R)
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rank, in_width = feature < R, column < D
    at = lane[:, None] + split[None, :]
    is_part = inside[:, None] & (split < N_SPLITS)[None, :]
    # All reads before anything that waits for one of them.
    read_at = parts + at[:, :, None] * R + feature[None, None, :]
    read = tl.load(read_at, is_part[:, :, None] & in_rank[None, None, :], other=0.0)
    l = tl.load(part_sums + at, is_part, other=-float("inf"))
    up_at = up + head.to(tl.int64) * (R * D) + feature[:, None] * D + column[None, :]
    weight = tl.load(up_at, in_rank[:, None] & in_width[None, :], other=0.0)
    top = tl.max(l, 1)
    share = tl.exp2(l - tl.where(top == -float("inf"), 0.0, top)[:, None])
    total = tl.sum(share, 1)
    share = share / tl.where(total > 0, total, 1.0)[:, None]
    x = tl.sum(read.to(tl.float32) * share[:, :, None], 1).to(DTYPE)
    out = tl.dot(x, weight.to(DTYPE))
    y_at = (row.to(tl.int64) * n_heads + head) * D
    tl.store(y + y_at[:, None] + column[None, :], out.to(DTYPE), inside[:, None] & in_width[None, :])


@dataclass(frozen=True)
class UpPlan:
    """What calls of one form launch: splits, and what joins and maps them, None where two launches take less."""

    plan: DecodePlan
    finish: Launch | None


def dba_decode_up(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    c: list[Tensor],
    k_geo: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    up: Tensor,
    window: int,
    max_seqlen: int,
    n_splits: int,
    admit: Callable[..., Callable[..., Tensor] | None] | None = None,
) -> Tensor:
    """Run the op; `admit` as in `dba_decode`, but that what it returns takes this op's arguments."""
    hint = power_of_2(max_seqlen) if max_seqlen > 0 else max_seqlen
    tensors = arguments(q_sem, q_geo, c, k_geo, [], seqlens, n_packed, [])
    rest = ("up", *kinds, len(c), len(k_geo), n_packed is None, window, hint, n_splits)
    found = decode.plans.get(rest, (*tensors, up))
    if found is None:
        if admit is not None:
            found = admit(q_sem, q_geo, kinds, c, k_geo, seqlens, n_packed, up, window, max_seqlen, n_splits)
        if found is None:
            given = (q_sem, q_geo, kinds, c, k_geo, [], n_packed, [], window, hint, n_splits)
            found = plan_up(decode.chosen(*given), q_sem, up)
        decode.plans.add(rest, (*tensors, up), found)
    if not isinstance(found, UpPlan):
        return found(q_sem, q_geo, kinds, c, k_geo, seqlens, n_packed, up, window, max_seqlen, n_splits)
    if found.finish is None:
        read, _ = decode.run(found.plan, tensors)
        return per_head_linear(read.transpose(1, 2), up)
    batch, heads, n_queries, _ = q_sem.shape
    y = q_sem.new_empty((batch, n_queries, heads, up.shape[-1]))
    up = up.contiguous()  # ahead of the splits: what joins them early waits for nothing that runs between
    found.finish(*decode.run_splits(found.plan, tensors), up, y)
    return y


def plan_up(plan: DecodePlan, q: Tensor, up: Tensor) -> UpPlan:
    """Lay out calls of the form of these queries and maps behind splits that are laid out."""
    batch, heads, n_queries, rank = q.shape
    width, rows = up.shape[-1], batch * n_queries
    n_splits, block_r = plan.n_splits, max(16, power_of_2(rank))
    splits = power_of_2(n_splits)
    if plan.join is None or not batch * heads * width:
        return UpPlan(plan, None)
    of_rows = BLOCK_T * splits * block_r
    if rows >= BLOCK_T and of_rows <= MOST_OF_ROWS and q.dtype != torch.float32:
        block_n = min(COLUMNS[1], max(16, power_of_2(width)))
        finish = Launch(
            _up_rows,
            (heads * -(-width // block_n), -(-rows // BLOCK_T)),
            (rows, n_queries, heads),
            {
                "R": rank,
                "D": width,
                "N_SPLITS": n_splits,
                "SPLITS": splits,
                "BLOCK_T": BLOCK_T,
                "BLOCK_R": block_r,
                "BLOCK_N": block_n,
            },
            num_warps=8,
        )
        return UpPlan(plan, finish)
    block_n = min(COLUMNS[0], power_of_2(width))
    programs = heads * -(-width // block_n) * rows
    whole = 1 << (n_splits.bit_length() - 1)
    more = power_of_2(n_splits - whole) if n_splits > whole else 0
    n_elements = (whole + more) * block_r
    is_little = n_elements <= MOST_ELEMENTS and programs * n_splits * rank <= MOST_READ
    if rows * heads > MOST_LANES:
        return UpPlan(plan, None)
    if not is_little:
        return UpPlan(plan, _of_many(plan, q, up) if rows == 1 else None)
    sizes = {"R": rank, "D": width, "SPLITS": whole, "MORE": more, "BLOCK_R": block_r, "BLOCK_N": block_n}
    finish = Launch(
        _up_row,
        (heads * -(-width // block_n), rows),
        (n_splits, n_queries, heads),
        {**sizes, "EARLY": plan.joins_early},
        num_warps=min(16, max(4, power_of_2(-(-n_elements // (32 * PER_THREAD))))),
        **pdl_options(plan.joins_early),
    )
    return UpPlan(plan, finish)


def _of_many(plan: DecodePlan, q: Tensor, up: Tensor) -> Launch | None:
    """Return what joins and maps many splits of one row in one launch, None where two take less."""
    heads, rank, width, n_splits = q.shape[1], q.shape[-1], up.shape[-1], plan.n_splits
    whole = 1 << (n_splits.bit_length() - 1)
    more = max(16, power_of_2(n_splits - whole))  # a product's least
    block_r, block_n = max(16, power_of_2(rank)), min(COLUMNS_OF_MANY, max(16, power_of_2(width)))
    programs = heads * -(-width // block_n)
    is_much = (whole + more) * block_r > MOST_OF_MANY or programs * n_splits * rank > MOST_READ
    if is_much or whole < 16 or q.dtype == torch.float32:
        return None
    sizes = {"R": rank, "D": width, "SPLITS": whole, "MORE": more, "BLOCK_R": block_r, "BLOCK_N": block_n}
    constants = {**sizes, "EARLY": plan.joins_early}
    return Launch(_up_many, (programs,), (n_splits, heads), constants, num_warps=4, **pdl_options(plan.joins_early))
