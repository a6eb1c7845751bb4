"""Queries of latent attention in one pass: q G_h on tensor cores, rotated and concatenated with q without going to memory.

A program holds the map of one head and walks over blocks of tokens. The backward sums the map's gradient in registers;
each program writes one part of it, and the parts are added in a fixed order. Widths and dtypes that the tiles do not hold
never come here: `caramba.ops.latent_queries` leaves them to plain PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

PROGRAMS = 1056, 396
"""Programs of forward and backward that there may be: on 132 multiprocessors two rounds of four, and one of three, as
many as registers let run at a time."""


@triton.jit
def _inside(inside, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Which elements of a tile exist, without a test of columns where the tile is as wide as the rows."""
    if WIDTH == BLOCK:
        mask = inside[:, None]
    else:
        mask = inside[:, None] & (column < WIDTH)[None, :]
    return mask


@triton.jit
def _map_halves(map_ptr, head, D: tl.constexpr, P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr):
    """Both halves of a head's map, [BLOCK_D, BLOCK_P] each."""
    feature, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    at = map_ptr + head * (D * 2 * P) + feature[:, None] * (2 * P) + pair[None, :]
    mask = (feature < D)[:, None] & (pair < P)[None, :]
    return tl.load(at, mask=mask, other=0.0), tl.load(at + P, mask=mask, other=0.0)


@triton.jit
def _forward_kernel(
    q_ptr,
    map_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    n_rows,
    n_tokens,
    n_heads,
    n_loops,
    table_batch,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head, chunk = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    feature, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    dtype = q_ptr.dtype.element_ty
    first_map, second_map = _map_halves(map_ptr, head, D, P, BLOCK_D, BLOCK_P)
    first_map, second_map = first_map.to(dtype), second_map.to(dtype)
    for block in range(chunk * n_loops, (chunk + 1) * n_loops):
        row = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = row < n_rows
        q_mask, pair_mask = _inside(inside, feature, D, BLOCK_D), _inside(inside, pair, P, BLOCK_P)
        table = (row // n_tokens) * table_batch + (row % n_tokens) * P
        cos = tl.load(cos_ptr + table[:, None] + pair[None, :], mask=pair_mask, other=0.0)
        sin = tl.load(sin_ptr + table[:, None] + pair[None, :], mask=pair_mask, other=0.0)
        at = row.to(tl.int64) * n_heads + head
        q = tl.load(q_ptr + (at * D)[:, None] + feature[None, :], mask=q_mask, other=0.0)
        first = tl.dot(q, first_map)
        second = tl.dot(q, second_map)
        y_at = y_ptr + (at * (D + 2 * P))[:, None]
        tl.store(y_at + feature[None, :], (q.to(tl.float32) * scale).to(dtype), mask=q_mask)
        geo_at = y_at + D + pair[None, :]
        tl.store(geo_at, ((first * cos - second * sin) * scale).to(dtype), mask=pair_mask)
        tl.store(geo_at + P, ((second * cos + first * sin) * scale).to(dtype), mask=pair_mask)


@triton.jit
def _backward_kernel(
    grad_ptr,
    q_ptr,
    map_ptr,
    cos_ptr,
    sin_ptr,
    grad_q_ptr,
    part_ptr,
    n_rows,
    n_tokens,
    n_heads,
    n_loops,
    table_batch,
    grad_batch,
    grad_token,
    grad_head,
    scale,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head, chunk = tl.program_id(0) % n_heads, tl.program_id(0) // n_heads
    feature, pair = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P)
    dtype = q_ptr.dtype.element_ty
    first_map, second_map = _map_halves(map_ptr, head, D, P, BLOCK_D, BLOCK_P)
    first_map, second_map = tl.trans(first_map.to(dtype)), tl.trans(second_map.to(dtype))
    first_sum = tl.zeros((BLOCK_D, BLOCK_P), tl.float32)
    second_sum = tl.zeros((BLOCK_D, BLOCK_P), tl.float32)
    for block in range(chunk * n_loops, (chunk + 1) * n_loops):
        row = block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = row < n_rows
        q_mask, pair_mask = _inside(inside, feature, D, BLOCK_D), _inside(inside, pair, P, BLOCK_P)
        batch, token = row // n_tokens, row % n_tokens
        table = batch * table_batch + token * P
        cos = tl.load(cos_ptr + table[:, None] + pair[None, :], mask=pair_mask, other=0.0)
        sin = tl.load(sin_ptr + table[:, None] + pair[None, :], mask=pair_mask, other=0.0)
        # Strides are given in whole tensors, which may hold more than 2^31 elements.
        grad_at = grad_ptr + (
            batch.to(tl.int64) * grad_batch + token.to(tl.int64) * grad_token + head.to(tl.int64) * grad_head
        )
        sem = tl.load(grad_at[:, None] + feature[None, :], mask=q_mask, other=0.0).to(tl.float32)
        geo_at = grad_at[:, None] + D + pair[None, :]
        first = tl.load(geo_at, mask=pair_mask, other=0.0).to(tl.float32) * scale
        second = tl.load(geo_at + P, mask=pair_mask, other=0.0).to(tl.float32) * scale
        first, second = (first * cos + second * sin).to(dtype), (second * cos - first * sin).to(dtype)
        q_at = (row.to(tl.int64) * n_heads + head) * D
        q = tl.load(q_ptr + q_at[:, None] + feature[None, :], mask=q_mask, other=0.0)
        through = tl.dot(first, first_map)
        through = tl.dot(second, second_map, through)
        grad_q = (sem * scale + through).to(dtype)
        tl.store(grad_q_ptr + q_at[:, None] + feature[None, :], grad_q, mask=q_mask)
        turned = tl.trans(q)
        first_sum = tl.dot(turned, first, first_sum)
        second_sum = tl.dot(turned, second, second_sum)
    part_at = part_ptr + (chunk * n_heads + head).to(tl.int64) * (D * 2 * P)
    part_at = part_at + feature[:, None] * (2 * P) + pair[None, :]
    mask = (feature < D)[:, None] & (pair < P)[None, :]
    tl.store(part_at, first_sum, mask=mask)
    tl.store(part_at + P, second_sum, mask=mask)


def _tiles(q: Tensor, geo_map: Tensor, programs: int) -> tuple[int, int, dict[str, int]]:
    """Chunks of tokens, blocks in each, and what the kernel is compiled for."""
    width, pairs = q.shape[-1], geo_map.shape[-1] // 2
    block_d = max(16, 1 << (width - 1).bit_length())
    block_p = max(16, 1 << (pairs - 1).bit_length())
    block_t = 32 if block_d + 2 * block_p > 256 else 64
    n_blocks = -(-(q.shape[0] * q.shape[1]) // block_t)
    n_chunks = max(1, min(n_blocks, programs // q.shape[2]))
    n_loops = -(-n_blocks // n_chunks)
    sizes = {"D": width, "P": pairs, "BLOCK_T": block_t, "BLOCK_D": block_d, "BLOCK_P": block_p}
    sizes["num_warps"] = 4 if block_d + 2 * block_p <= 128 else 8
    return -(-n_blocks // n_loops), n_loops, sizes


def _table_batch(cos: Tensor) -> int:
    return cos.shape[-2] * cos.shape[-1] if cos.dim() == 4 and cos.shape[0] > 1 else 0


def latent_queries(q: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    batch, n_tokens, heads, width = q.shape
    y = q.new_empty((batch, n_tokens, heads, width + geo_map.shape[-1]))
    if y.numel() == 0:
        return y
    q, geo_map = q.contiguous(), geo_map.contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    n_chunks, n_loops, sizes = _tiles(q, geo_map, PROGRAMS[0])
    with torch.cuda.device_of(q):
        _forward_kernel[(n_chunks * heads,)](
            *(q, geo_map, cos, sin, y, batch * n_tokens, n_tokens, heads, n_loops, _table_batch(cos), scale),
            **sizes,
            num_stages=3,
        )
    return y


def latent_queries_backward(
    grad: Tensor, q: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0:
        return torch.empty_like(q), torch.zeros_like(geo_map)
    batch, n_tokens, heads = q.shape[:3]
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    q, maps = q.contiguous(), geo_map.contiguous()
    cos, sin = cos.float().contiguous(), sin.float().contiguous()
    n_chunks, n_loops, sizes = _tiles(q, maps, PROGRAMS[1])
    grad_q = torch.empty_like(q)
    parts = torch.empty((n_chunks, *maps.shape), dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _backward_kernel[(n_chunks * heads,)](
            *(grad, q, maps, cos, sin, grad_q, parts, batch * n_tokens, n_tokens, heads, n_loops),
            *(_table_batch(cos), *grad.stride()[:3], scale),
            **sizes,
            num_stages=2,
        )
    return grad_q, parts.sum(0).to(geo_map.dtype)
