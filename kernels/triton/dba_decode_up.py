"""Launcher of `caramba::dba_decode_up`, and its kernel, which joins splits and maps what a head has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import caramba.kernels.triton.dba_decode as decode
from caramba.kernels.triton.head_products import head_values
from caramba.kernels.triton.launch import Launches, form
from torch import Tensor

import triton
import triton.language as tl

FEW_SPLITS, TILE_ROWS = 16, 16
"""Splits up to which a program takes TILE_ROWS rows and one split after another; else it has one row, and several
splits at a time."""
SPLITS_AT_ONCE = 64
COLUMNS = 32
"""Columns of a program where rows are many; of few rows, each program of a head would read all of its splits again."""


@triton.jit
def _joined_values_kernel(
    parts,
    sums,
    weight,
    y,
    n_rows,
    n_tokens,
    n_heads,
    n_splits,
    R: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows are (sequence, token), those of the parts (sequence, head, token); sums are in base-2 logarithms.

    With EARLY it begins while the splits end, and waits until all that they stored can be read.
    """
    DTYPE: tl.constexpr = y.dtype.element_ty
    head, part = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    column = part * BLOCK_N + tl.arange(0, BLOCK_N)
    feature = tl.arange(0, BLOCK_R)
    w_at = weight + head.to(tl.int64) * (R * D) + feature[:, None] * D + column[None, :]
    w = tl.load(w_at, (feature < R)[:, None] & (column < D)[None, :], other=0.0).to(DTYPE)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # the weight is from before the splits
    if BLOCK_T == 1:
        row = tl.program_id(1).to(tl.int64)
        at = (row // n_tokens * n_heads + head) * n_tokens + row % n_tokens
        s = tl.arange(0, BLOCK_S)
        top = -float("inf")
        for first in tl.range(0, n_splits, BLOCK_S):
            l = tl.load(sums + at * n_splits + first + s, first + s < n_splits, other=-float("inf"))
            top = tl.maximum(top, tl.max(l, 0))
        finite = tl.where(top == -float("inf"), 0.0, top)
        total = 0.0
        read = tl.zeros([BLOCK_R], tl.float32)
        for first in tl.range(0, n_splits, BLOCK_S):
            is_split = first + s < n_splits
            l = tl.load(sums + at * n_splits + first + s, is_split, other=-float("inf"))
            share = tl.exp2(l - finite)
            total += tl.sum(share, 0)
            p_at = parts + (at * n_splits + first + s)[:, None] * R + feature[None, :]
            p = tl.load(p_at, is_split[:, None] & (feature < R)[None, :], other=0.0)
            read += tl.sum(p * share[:, None], 0)
        read = (read / tl.where(total > 0, total, 1.0)).to(DTYPE).to(tl.float32)
        out = tl.sum(read[:, None] * w.to(tl.float32), 0)
        tl.store(y + (row * n_heads + head) * D + column, out.to(DTYPE), column < D)
    else:
        row = tl.program_id(1).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = row < n_rows
        at = (row // n_tokens * n_heads + head) * n_tokens + row % n_tokens
        s = tl.arange(0, BLOCK_S)
        l_at = sums + (at * n_splits)[:, None] + s[None, :]
        l = tl.load(l_at, inside[:, None] & (s < n_splits)[None, :], other=-float("inf"))
        top = tl.max(l, 1)
        finite = tl.where(top == -float("inf"), 0.0, top)
        total = tl.sum(tl.exp2(l - finite[:, None]), 1)
        read = tl.zeros([BLOCK_T, BLOCK_R], tl.float32)
        for one in tl.range(0, n_splits, num_stages=4):
            share = tl.exp2(tl.load(sums + at * n_splits + one, inside, other=-float("inf")) - finite)
            p_at = parts + (at * n_splits + one)[:, None] * R + feature[None, :]
            p = tl.load(p_at, inside[:, None] & (feature < R)[None, :], other=0.0)
            read += p * share[:, None]
        read = read / tl.where(total > 0, total, 1.0)[:, None]
        out = tl.dot(read.to(DTYPE), w)
        y_at = y + ((row * n_heads + head) * D)[:, None] + column[None, :]
        tl.store(y_at, out.to(DTYPE), inside[:, None] & (column < D)[None, :])


_joined = Launches(_joined_values_kernel)


def dba_decode_up(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    v_up: Tensor,
    window: int,
    max_seqlen: int,
    admit: Callable[..., Any] | None = None,
) -> Tensor:
    """Run the op as `dba_decode` is planned for these arguments; `admit` is called with those of a new form first."""
    given = (q_sem, q_geo, kinds, k_sem, k_geo, seqlens, n_packed, v_up, window, max_seqlen)

    def admitted(*_: Any) -> Any:
        return None if admit is None else admit(*given)

    found = decode.planned(
        q_sem, q_geo, kinds, k_sem, k_geo, [], seqlens, n_packed, [], window, max_seqlen, 0, admitted, v_up
    )
    if not isinstance(found, decode.Plan):
        return found(*given)
    if found.join is not None:
        v_up = v_up.contiguous()  # ahead of the splits: the kernel after them may not wait to read it
    parts, part_sums = decode.split(found, q_sem, q_geo, k_sem, k_geo, [], seqlens, n_packed)
    if found.join is None:
        return head_values(parts.transpose(1, 2), v_up)
    return _joined_values(parts, part_sums, q_sem, v_up, found.early)


def _joined_values(parts: Tensor, sums: Tensor, q: Tensor, v_up: Tensor, early: bool) -> Tensor:
    """Join the partial results [rows, splits, R] of queries q [B, H, T, ·] and map them."""
    batch, heads, n_tokens, _ = q.shape
    n_splits, latent, width = parts.shape[1], parts.shape[2], v_up.shape[-1]
    y = q.new_empty((batch, n_tokens, heads, width))
    if y.numel() == 0:
        return y
    key = (form(parts), y.shape, y.dtype, v_up.dtype, early)
    launch = _joined.get(key)
    if launch is None:
        rows = batch * n_tokens
        is_tiled = rows >= TILE_ROWS and n_splits <= FEW_SPLITS
        block_t = TILE_ROWS if is_tiled else 1
        at_once = n_splits if is_tiled else min(n_splits, SPLITS_AT_ONCE)
        block_n = COLUMNS if rows > 1 else decode.power_of_2(width)
        launch = _joined.add(
            key,
            (heads * decode.ceil_div(width, block_n), decode.ceil_div(rows, block_t)),
            (rows, n_tokens, heads, n_splits),
            *(
                latent,
                width,
                block_t,
                max(16, decode.power_of_2(latent)),
                decode.power_of_2(at_once),
                block_n,
                early,
            ),
            num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )
    launch(parts, sums, v_up, y)
    return y
