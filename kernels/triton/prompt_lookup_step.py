"""Kernel and launcher of `caramba::prompt_lookup_step`: a program per row, one launch where plain PyTorch takes fifty."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches, power_of_2
from torch import Tensor

import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _token(ids_ptr, sampled_ptr, at, before, inside):
    """Return tokens of the text, of which those from `before` on are still among the sampled ones.

    So no token is read that this program has written, which it could only after a barrier.
    """
    old = tl.load(ids_ptr + at, mask=inside & (at < before), other=0)
    return tl.where(at < before, old, tl.load(sampled_ptr + at - before, mask=inside & (at >= before), other=0))


@triton.jit
def _round_kernel(
    ids_ptr,
    lengths_ptr,
    state_ptr,
    sampled_ptr,
    live_ptr,
    kept_ptr,
    n_ids,
    most,
    max_ngram,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    K: tl.constexpr,
    K_P: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    ids_ptr += row * n_ids
    state_ptr += row * (2 + K)
    sampled_ptr += row * WIDTH
    before = tl.load(lengths_ptr + row).to(tl.int64) - WIDTH + 1
    size = tl.load(state_ptr)
    place = tl.arange(0, WIDTH_P)
    sampled = tl.load(sampled_ptr + place, mask=place < WIDTH, other=0)
    count = tl.where(size > 0, tl.minimum(most, WIDTH - 1), 0)
    draft = tl.load(state_ptr + 2 + place, mask=place < count, other=0)
    accepted = tl.min(tl.where((place < count) & (draft != sampled), place, count), axis=0)
    kept = accepted + 1
    if not EXTRA:
        kept = tl.where((accepted == count) & (count > 0), accepted, kept)
    kept = tl.where(tl.load(live_ptr + row) != 0, kept, 0)
    tl.store(ids_ptr + before + place, sampled, mask=place < kept)
    length = before + kept

    # The longest run, and of equals the latest: its length and its end in one number.
    best = tl.zeros((), tl.int64)
    for first in range(0, length, BLOCK_N):
        end = first + tl.arange(0, BLOCK_N).to(tl.int64)
        is_run = (end > 0) & (end < length)
        run = tl.zeros((BLOCK_N,), tl.int64)
        for back in range(1, max_ngram + 1):
            last = _token(ids_ptr, sampled_ptr, length - back, before, length >= back)
            is_run = is_run & (end >= back) & (length >= back)
            is_run = is_run & (_token(ids_ptr, sampled_ptr, end - back, before, is_run) == last)
            run += is_run.to(tl.int64)
        best = tl.maximum(best, tl.max(tl.where(run > 0, run * n_ids + end, 0), axis=0))
    start = best % n_ids
    offset = tl.arange(0, K_P).to(tl.int64)
    source = start + offset % (length - start)
    found = _token(ids_ptr, sampled_ptr, source, before, (offset < K) & (best > 0))
    # All threads have read what is of this round before one writes what is of the next.
    tl.debug_barrier()
    tl.store(lengths_ptr + row, (length - 1).to(tl.int32))
    tl.store(kept_ptr + row, kept.to(tl.int64))
    tl.store(state_ptr, best // n_ids)
    tl.store(state_ptr + 1, _token(ids_ptr, sampled_ptr, length - 1, before, length > 0))
    tl.store(state_ptr + 2 + offset, tl.where(best > 0, found, 0), mask=offset < K)


_rounds = Launches(_round_kernel)


def prompt_lookup_step(
    ids: Tensor,
    lengths: Tensor,
    state: Tensor,
    sampled: Tensor,
    live: Tensor,
    most: int,
    max_ngram: int,
    extra: bool,
) -> Tensor:
    kept = torch.empty_like(lengths, dtype=torch.int64)
    (n_rows, n_ids), width, n_drafts = ids.shape, sampled.shape[1], state.shape[1] - 2
    if not n_rows:
        return kept
    key = (n_rows, n_ids, width, n_drafts, most, max_ngram, extra, ids.get_device())
    launch = _rounds.get(key)
    if launch is None:
        constants = (width, power_of_2(width), n_drafts, power_of_2(n_drafts), extra, BLOCK)
        launch = _rounds.add(key, (n_rows,), (n_ids, most, max_ngram), *constants, num_warps=8)
    launch(ids, lengths, state, sampled, live, kept)
    return kept
