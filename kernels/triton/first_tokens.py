"""Attention to a few exact first tokens, in one pass over the queries: RoPE, scores, softmax and values in registers.

A program walks over blocks of positions of one head. Both halves of a head's features are tiles of their own, as RoPE
pairs them. The backward computes the scores again and sums the gradients of keys, values and mean in registers; each
program writes one part of them, and the parts are added in a fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl

MOST_POSITIONS, TILE = 64, 2048
"""Positions of a block, and numbers of one of its tiles: a dozen of these are in registers."""
LOOPS = 4
"""Blocks that a program walks over: more make fewer parts to add, fewer fill the device with short sequences."""


@triton.jit
def _halves(at, mask, P: tl.constexpr):
    """Both halves of features, in fp32."""
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(at + P, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rows(x_ptr, batch, head, t, x_batch, x_head, x_token, pair, mask, P: tl.constexpr):
    """Both halves of a head's features at a block of positions, of a tensor with these strides."""
    at = x_ptr + batch.to(tl.int64) * x_batch + head.to(tl.int64) * x_head + t.to(tl.int64)[:, None] * x_token
    return _halves(at + pair[None, :], mask, P)


@triton.jit
def _tables(cos_ptr, sin_ptr, t, pair, mask, P: tl.constexpr):
    """Cosines and sines of a block of positions."""
    at = t[:, None] * P + pair[None, :]
    return tl.load(cos_ptr + at, mask=mask, other=0.0), tl.load(sin_ptr + at, mask=mask, other=0.0)


@triton.jit
def _score(first, second, k_first, k_second, shift, t, j):
    """Scores of a block's positions on token j, minus infinity of positions before it."""
    score = tl.sum(first * k_first[None, :] + second * k_second[None, :], axis=1) - shift
    return tl.where(t >= j, score, float("-inf"))


@triton.jit
def _forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    mean_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    lse_ptr,
    q_batch,
    q_head,
    q_token,
    n_tokens,
    n_heads,
    per_group,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    N_LOOPS: tl.constexpr,
):
    batch, head = tl.program_id(1) // n_heads, tl.program_id(1) % n_heads
    groups, group = n_heads // per_group, head // per_group
    pair = tl.arange(0, BLOCK_P)
    is_pair = pair < P
    mean_first, mean_second = _halves(mean_ptr + group * (2 * P) + pair, is_pair, P)
    keys = (batch * groups + group) * (N * 2 * P) + pair
    dtype = q_ptr.dtype.element_ty
    for loop in range(N_LOOPS):
        t = (tl.program_id(0) * N_LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)
        inside = t < n_tokens
        mask = inside[:, None] & is_pair[None, :]
        q_first, q_second = _rows(q_ptr, batch, head, t, q_batch, q_head, q_token, pair, mask, P)
        shift = tl.sum(q_first * mean_first[None, :] + q_second * mean_second[None, :], axis=1)
        cos, sin = _tables(cos_ptr, sin_ptr, t, pair, mask, P)
        first, second = q_first * cos - q_second * sin, q_second * cos + q_first * sin
        peak = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        out_first = tl.zeros((BLOCK, BLOCK_P), tl.float32)
        out_second = tl.zeros((BLOCK, BLOCK_P), tl.float32)
        for j in range(N):
            k_first, k_second = _halves(k_ptr + keys + j * (2 * P), is_pair, P)
            v_first, v_second = _halves(v_ptr + keys + j * (2 * P), is_pair, P)
            score = _score(first, second, k_first, k_second, shift, t, j)
            higher = tl.maximum(peak, score)  # finite from the first token on, which every position sees
            kept, weight = tl.exp(peak - higher), tl.exp(score - higher)
            total = total * kept + weight
            out_first = out_first * kept[:, None] + weight[:, None] * v_first[None, :]
            out_second = out_second * kept[:, None] + weight[:, None] * v_second[None, :]
            peak = higher
        row = (batch.to(tl.int64) * n_tokens + t) * n_heads + head
        out_at = out_ptr + (row * (2 * P))[:, None] + pair[None, :]
        tl.store(out_at, (out_first / total[:, None]).to(dtype), mask=mask)
        tl.store(out_at + P, (out_second / total[:, None]).to(dtype), mask=mask)
        lse_at = (batch.to(tl.int64) * n_heads + head) * n_tokens + t
        tl.store(lse_ptr + lse_at, peak + tl.log(total), mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr,
    grad_lse_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    mean_ptr,
    cos_ptr,
    sin_ptr,
    lse_ptr,
    grad_q_ptr,
    part_ptr,
    grad_batch,
    grad_head,
    grad_token,
    q_batch,
    q_head,
    q_token,
    n_tokens,
    n_heads,
    per_group,
    N: tl.constexpr,
    P: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    N_LOOPS: tl.constexpr,
):
    batch, head = tl.program_id(1) // n_heads, tl.program_id(1) % n_heads
    groups, group = n_heads // per_group, head // per_group
    pair, place = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    is_pair = pair < P
    mean_first, mean_second = _halves(mean_ptr + group * (2 * P) + pair, is_pair, P)
    keys = (batch * groups + group) * (N * 2 * P) + pair
    dtype = q_ptr.dtype.element_ty
    k_sum_first = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    k_sum_second = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    v_sum_first = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    v_sum_second = tl.zeros((BLOCK_N, BLOCK_P), tl.float32)
    mean_sum_first = tl.zeros((BLOCK_P,), tl.float32)
    mean_sum_second = tl.zeros((BLOCK_P,), tl.float32)
    for loop in range(N_LOOPS):
        t = (tl.program_id(0) * N_LOOPS + loop) * BLOCK + tl.arange(0, BLOCK)
        inside = t < n_tokens
        mask = inside[:, None] & is_pair[None, :]
        q_first, q_second = _rows(q_ptr, batch, head, t, q_batch, q_head, q_token, pair, mask, P)
        g_first, g_second = _rows(grad_ptr, batch, head, t, grad_batch, grad_head, grad_token, pair, mask, P)
        shift = tl.sum(q_first * mean_first[None, :] + q_second * mean_second[None, :], axis=1)
        cos, sin = _tables(cos_ptr, sin_ptr, t, pair, mask, P)
        first, second = q_first * cos - q_second * sin, q_second * cos + q_first * sin
        row = (batch.to(tl.int64) * n_heads + head) * n_tokens + t
        lse = tl.load(lse_ptr + row, mask=inside, other=float("inf"))  # weights of 0 beyond the sequence
        through_lse = tl.load(grad_lse_ptr + row, mask=inside, other=0.0)
        mixed = tl.zeros((BLOCK,), tl.float32)
        for j in range(N):
            k_first, k_second = _halves(k_ptr + keys + j * (2 * P), is_pair, P)
            v_first, v_second = _halves(v_ptr + keys + j * (2 * P), is_pair, P)
            weight = tl.exp(_score(first, second, k_first, k_second, shift, t, j) - lse)
            mixed += weight * tl.sum(g_first * v_first[None, :] + g_second * v_second[None, :], axis=1)
        rotated_first = tl.zeros((BLOCK, BLOCK_P), tl.float32)
        rotated_second = tl.zeros((BLOCK, BLOCK_P), tl.float32)
        summed = tl.zeros((BLOCK,), tl.float32)
        for j in range(N):
            k_first, k_second = _halves(k_ptr + keys + j * (2 * P), is_pair, P)
            v_first, v_second = _halves(v_ptr + keys + j * (2 * P), is_pair, P)
            weight = tl.exp(_score(first, second, k_first, k_second, shift, t, j) - lse)
            through = tl.sum(g_first * v_first[None, :] + g_second * v_second[None, :], axis=1)
            grad_score = weight * (through - mixed + through_lse)
            summed += grad_score
            rotated_first += grad_score[:, None] * k_first[None, :]
            rotated_second += grad_score[:, None] * k_second[None, :]
            is_j = (place == j)[:, None]
            k_sum_first += tl.where(is_j, tl.sum(grad_score[:, None] * first, axis=0)[None, :], 0.0)
            k_sum_second += tl.where(is_j, tl.sum(grad_score[:, None] * second, axis=0)[None, :], 0.0)
            v_sum_first += tl.where(is_j, tl.sum(weight[:, None] * g_first, axis=0)[None, :], 0.0)
            v_sum_second += tl.where(is_j, tl.sum(weight[:, None] * g_second, axis=0)[None, :], 0.0)
        mean_sum_first -= tl.sum(summed[:, None] * q_first, axis=0)
        mean_sum_second -= tl.sum(summed[:, None] * q_second, axis=0)
        grad_first = rotated_first * cos + rotated_second * sin - summed[:, None] * mean_first[None, :]
        grad_second = rotated_second * cos - rotated_first * sin - summed[:, None] * mean_second[None, :]
        to = grad_q_ptr + (((batch.to(tl.int64) * n_tokens + t) * n_heads + head) * (2 * P))[:, None] + pair[None, :]
        tl.store(to, grad_first.to(dtype), mask=mask)
        tl.store(to + P, grad_second.to(dtype), mask=mask)
    # Rows of a part: N of keys, N of values, one of the mean.
    part = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * ((2 * N + 1) * 2 * P)
    at = part_ptr + part + place[:, None] * (2 * P) + pair[None, :]
    mask = (place < N)[:, None] & is_pair[None, :]
    tl.store(at, k_sum_first, mask=mask)
    tl.store(at + P, k_sum_second, mask=mask)
    tl.store(at + N * 2 * P, v_sum_first, mask=mask)
    tl.store(at + N * 2 * P + P, v_sum_second, mask=mask)
    mean_at = part_ptr + part + 2 * N * 2 * P + pair
    tl.store(mean_at, mean_sum_first, mask=is_pair)
    tl.store(mean_at + P, mean_sum_second, mask=is_pair)


def first_tokens(q: Tensor, k: Tensor, v: Tensor, mean: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = q.shape
    out = q.new_empty((batch, length, heads, width)).transpose(1, 2)
    lse = q.new_empty((batch, heads, length, 1), dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    q, others, grid, sizes = _plan(q, k, v, mean, cos, sin)
    with torch.cuda.device_of(q):
        _forward_kernel[grid](
            *(q, *others, out, lse, *q.stride()[:3], length, heads, heads // k.shape[1]), **sizes, num_warps=4
        )
    return out, lse


def first_tokens_backward(
    grad: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mean: Tensor,
    cos: Tensor,
    sin: Tensor,
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, width = q.shape
    n_groups, n_tokens = k.shape[1:3]
    grad_q = q.new_empty((batch, length, heads, width)).transpose(1, 2)
    if q.numel() == 0:
        return grad_q, torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(mean)
    q, others, grid, sizes = _plan(q, k, v, mean, cos, sin)
    grad = grad if grad.stride(-1) == 1 else grad.contiguous()
    parts = torch.empty((batch, n_groups, heads // n_groups, grid[0], 2 * n_tokens + 1, width), device=q.device)
    with torch.cuda.device_of(q):
        _backward_kernel[grid](
            *(grad, grad_lse.contiguous(), q, *others, lse.contiguous(), grad_q, parts),
            *(*grad.stride()[:3], *q.stride()[:3], length, heads, heads // n_groups),
            **sizes,
            BLOCK_N=triton.next_power_of_2(n_tokens),
            num_warps=4,
        )
    found = parts.sum((2, 3))
    k_part, v_part, mean_part = found.split((n_tokens, n_tokens, 1), dim=2)
    return grad_q, k_part.to(k.dtype), v_part.to(v.dtype), mean_part.squeeze(2).sum(0).to(mean.dtype)


def _plan(
    q: Tensor, k: Tensor, v: Tensor, mean: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, tuple[Tensor, ...], tuple[int, int], dict[str, int]]:
    """The queries with features side by side, the other operands, the grid, and what a kernel is compiled for."""
    batch, heads, length, width = q.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    others = tuple(x.contiguous() for x in (k, v, mean, cos.float(), sin.float()))
    block_p = max(16, triton.next_power_of_2(width // 2))
    block = min(MOST_POSITIONS, TILE // block_p)
    n_loops = max(1, min(LOOPS, length // block))
    grid = (triton.cdiv(length, block * n_loops), batch * heads)
    sizes = {"N": k.shape[2], "P": width // 2, "BLOCK": block, "BLOCK_P": block_p, "N_LOOPS": n_loops}
    return q, others, grid, sizes
