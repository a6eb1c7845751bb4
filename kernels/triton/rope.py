"""RoPE by tables: rows of (token, head), in memory order."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

TILE = 2048
"""Pairs of a program."""


# Counts change from prompt to prompt, and no load depends on what divides them: one kernel serves all.
@triton.jit(do_not_specialize=["n_tokens", "n_blocks"])
def _kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    n_heads,
    n_tokens,
    n_pairs,
    group,
    n_blocks,
    x_batch,
    x_head,
    x_token,
    y_batch,
    y_head,
    y_token,
    table_batch,
    scale,
    INVERSE: tl.constexpr,
    HEADS_INNER: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    program = tl.program_id(0)
    batch = (program // n_blocks).to(tl.int64)
    row = (program % n_blocks) * BLOCK_R + tl.arange(0, BLOCK_R)
    if HEADS_INNER:
        token, head = row // n_heads, row % n_heads
    else:
        head, token = row // n_tokens, row % n_tokens
    pair = tl.arange(0, BLOCK_P)
    mask = (row < n_heads * n_tokens)[:, None] & (pair < n_pairs)[None, :]
    # Strides are given in whole tensors, which may hold more than 2^31 elements.
    head, token = head.to(tl.int64), token.to(tl.int64)
    table = batch * table_batch + ((head // group) * n_tokens + token)[:, None] * n_pairs + pair[None, :]
    cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(ACC)
    sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(ACC)
    if INVERSE:
        sin = -sin
    x_at = x_ptr + (batch * x_batch + head * x_head + token * x_token)[:, None] + pair[None, :]
    first = tl.load(x_at, mask=mask, other=0.0).to(ACC)
    second = tl.load(x_at + n_pairs, mask=mask, other=0.0).to(ACC)
    y_at = y_ptr + (batch * y_batch + head * y_head + token * y_token)[:, None] + pair[None, :]
    tl.store(y_at, ((first * cos - second * sin) * scale).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_at + n_pairs, ((second * cos + first * sin) * scale).to(y_ptr.dtype.element_ty), mask=mask)


_launches = Launches(_kernel)


def rope(x: Tensor, cos: Tensor, sin: Tensor, scale: float, inverse: bool, dtype: torch.dtype) -> Tensor:
    out = torch.empty_like(x, dtype=dtype)
    if x.numel() == 0:
        return out
    # empty_like orders strides as x does; the kernel needs rows that are contiguous.
    y = out if out.stride(-1) == 1 else torch.empty(x.shape, dtype=dtype, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, n_heads, n_tokens, width = x.shape
    cos, sin = cos.contiguous(), sin.contiguous()
    x_strides, y_strides = x.stride()[:3], y.stride()[:3]
    key = (
        x.shape,
        cos.shape,
        x_strides,
        y_strides,
        x.dtype,
        cos.dtype,
        dtype,
        scale,
        inverse,
        x.get_device(),
    )
    launch = _launches.get(key)
    if launch is None:
        groups, n_pairs = cos.shape[-3], width // 2
        block_p = max(8, 1 << (n_pairs - 1).bit_length())
        block_r = max(1, TILE // block_p)
        n_blocks = -(-n_heads * n_tokens // block_r)
        table_batch = groups * n_tokens * n_pairs if cos.dim() == 4 else 0
        launch = _launches.add(
            *(key, (batch * n_blocks,)),
            (
                n_heads,
                n_tokens,
                n_pairs,
                n_heads // groups,
                n_blocks,
                *x_strides,
                *y_strides,
                table_batch,
                scale,
            ),
            *(inverse, x.stride(1) < x.stride(2)),
            *(tl.float64 if x.dtype == torch.float64 else tl.float32, block_r, block_p),
            num_warps=min(max(block_r * block_p // 512, 1), 16),
        )
    launch(x, cos, sin, y)
    return out if y is out else out.copy_(y)
