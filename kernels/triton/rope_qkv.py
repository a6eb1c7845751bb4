"""Queries, keys and values out of one product and one gradient back into it: blocks of rows (token, head)."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from torch import Tensor

import triton
import triton.language as tl

TILE = 1024
"""Pairs of a program."""


@triton.jit
def _block(
    joined_ptr,
    part_ptr,
    cos_ptr,
    sin_ptr,
    block,
    n_tokens,
    n_places,
    joined_batch,
    joined_token,
    part_batch,
    part_head,
    part_token,
    table_batch,
    scale,
    FIRST: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    TURNS: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Move a block of the heads that begin at `FIRST` in the product, out of it or, backward, into it."""
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    place, head = row // HEADS, row % HEADS
    pair = tl.arange(0, BLOCK_P)
    mask = (place < n_places)[:, None] & (pair < PAIRS)[None, :]
    # Strides are given in whole tensors, which may hold more than 2^31 elements.
    batch, token, head = (place // n_tokens).to(tl.int64), (place % n_tokens).to(tl.int64), head.to(tl.int64)
    whole = batch * joined_batch + token * joined_token + (FIRST + head) * (2 * PAIRS)
    part = batch * part_batch + token * part_token + head * part_head
    whole_at = joined_ptr + whole[:, None] + pair[None, :]
    part_at = part_ptr + part[:, None] + pair[None, :]
    if BACKWARD:
        source, target = part_at, whole_at
    else:
        source, target = whole_at, part_at
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + PAIRS, mask=mask, other=0.0)
    if TURNS:
        table = (batch * table_batch + token * PAIRS)[:, None] + pair[None, :]
        cos = tl.load(cos_ptr + table, mask=mask, other=0.0).to(ACC)
        sin = tl.load(sin_ptr + table, mask=mask, other=0.0).to(ACC)
        if BACKWARD:
            sin = -sin
        real, imaginary = first.to(ACC), second.to(ACC)
        first = (real * cos - imaginary * sin) * scale
        second = (imaginary * cos + real * sin) * scale
    dtype = joined_ptr.dtype.element_ty
    tl.store(target, first.to(dtype), mask=mask)
    tl.store(target + PAIRS, second.to(dtype), mask=mask)


# Counts change from prompt to prompt, and no load depends on what divides them: one kernel serves all.
@triton.jit(do_not_specialize=["n_tokens", "n_places", "q_blocks", "kv_blocks"])
def _kernel(
    joined_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    n_tokens,
    n_places,
    q_blocks,
    kv_blocks,
    joined_batch,
    joined_token,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    table_batch,
    scale,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    BACKWARD: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    block = tl.program_id(0)
    if block < q_blocks:
        _block(
            joined_ptr,
            q_ptr,
            cos_ptr,
            sin_ptr,
            block,
            n_tokens,
            n_places,
            joined_batch,
            joined_token,
            q_batch,
            q_head,
            q_token,
            table_batch,
            scale,
            0,
            HEADS,
            PAIRS,
            True,
            BACKWARD,
            ACC,
            BLOCK_R,
            BLOCK_P,
        )
    elif block < q_blocks + kv_blocks:
        _block(
            joined_ptr,
            k_ptr,
            cos_ptr,
            sin_ptr,
            block - q_blocks,
            n_tokens,
            n_places,
            joined_batch,
            joined_token,
            k_batch,
            k_head,
            k_token,
            table_batch,
            1.0,
            HEADS,
            KV_HEADS,
            PAIRS,
            True,
            BACKWARD,
            ACC,
            BLOCK_R,
            BLOCK_P,
        )
    else:
        _block(
            joined_ptr,
            v_ptr,
            cos_ptr,
            sin_ptr,
            block - q_blocks - kv_blocks,
            n_tokens,
            n_places,
            joined_batch,
            joined_token,
            v_batch,
            v_head,
            v_token,
            table_batch,
            1.0,
            HEADS + KV_HEADS,
            KV_HEADS,
            PAIRS,
            False,
            BACKWARD,
            ACC,
            BLOCK_R,
            BLOCK_P,
        )


_launches = Launches(_kernel)


def _launch(
    joined: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    cos: Tensor,
    sin: Tensor,
    scale: float,
    *,
    is_backward: bool,
) -> None:
    """Move between a product [B, T, (H + 2K) D] and q, k and v [B, N, T, D]; all have stride 1 within a head."""
    cos, sin = cos.contiguous(), sin.contiguous()
    q, k, v = parts
    key = (
        *(q.shape, k.shape[1], joined.stride(), q.stride(), k.stride(), v.stride(), cos.shape),
        *(joined.dtype, q.dtype, k.dtype, v.dtype, cos.dtype, scale, is_backward, joined.get_device()),
    )
    launch = _launches.get(key)
    if launch is None:
        (batch, n_heads, n_tokens, width), kv_heads = q.shape, k.shape[1]
        pairs, places = width // 2, batch * n_tokens
        block_p = max(8, 1 << (pairs - 1).bit_length())
        block_r = max(1, TILE // block_p)
        q_blocks, kv_blocks = (triton.cdiv(places * heads, block_r) for heads in (n_heads, kv_heads))
        strides = (*joined.stride()[:2], *(s for x in parts for s in x.stride()[:3]))
        table_batch = n_tokens * pairs if cos.dim() == 4 else 0
        launch = _launches.add(
            *(key, (q_blocks + 2 * kv_blocks,)),
            (n_tokens, places, q_blocks, kv_blocks, *strides, table_batch, scale),
            *(n_heads, kv_heads, pairs, is_backward),
            *(tl.float64 if joined.dtype == torch.float64 else tl.float32, block_r, block_p),
            num_warps=min(max(block_r * block_p // 512, 1), 16),
        )
    launch(joined, *parts, cos, sin)


def rope_qkv(
    joined: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    joined = joined if joined.stride(-1) == 1 else joined.contiguous()
    batch, tokens, width = joined.shape
    head_dim = width // (n_heads + 2 * n_kv_heads)
    q, k, v = (
        torch.empty(batch, tokens, heads, head_dim, dtype=joined.dtype, device=joined.device).transpose(1, 2)
        for heads in (n_heads, n_kv_heads, n_kv_heads)
    )
    if joined.numel():
        _launch(joined, (q, k, v), cos, sin, scale, is_backward=False)
    return q, k, v


def rope_qkv_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, n_heads: int, n_kv_heads: int, scale: float
) -> Tensor:
    batch, _, tokens, head_dim = dq.shape
    width = (n_heads + 2 * n_kv_heads) * head_dim
    joined = torch.empty(batch, tokens, width, dtype=dq.dtype, device=dq.device)
    if joined.numel():
        dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
        _launch(joined, (dq, dk, dv), cos, sin, scale, is_backward=True)
    return joined
