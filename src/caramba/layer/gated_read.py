"""A read of memory slots by a softmax of its own, mixed with attention to the window by a share a head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.layer.score import CausalScore
from caramba.ops.memory_bank import MemoryState, memory_bank

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tensors of `memory_bank`."""


def read_gated(
    given: Given,
    share: Tensor,
    score: CausalScore,
    *,
    state: MemoryState | None = None,
    first: Tensor | None = None,
    chunk: int,
    bptt_chunks: int = 0,
) -> Tensor:
    """Return (1 - share) attention to the window + share attention to the slots; empty slots leave the window alone.

    Arguments are those of `memory_bank`; `score` attends to the window.

    Shape: share [H], in at least float32; returns [B, H, T, Dv] in q's dtype.

    Reference: Munkhdalai et al., 2024, arXiv:2404.07143 (the share of a head).
    """
    q, k, v = given[:3]
    assert score.window is not None
    near = score(q, k, v, None, first)
    far, _ = memory_bank(
        *delay_writes(given, score.window),
        window=0,
        state=state,
        first=None if first is None else first + score.window,
        chunk=chunk,
        bptt_chunks=bptt_chunks,
    )
    mix = share[:, None, None] * _has_slots(q, k, score.window, state, first)
    return torch.lerp(near.to(mix.dtype), far.to(mix.dtype), mix).to(q.dtype)


def delay_writes(given: Given, window: int) -> Given:
    """Return tensors with which the op at window 0 writes what it writes at `window`, and reads the slots alone."""
    q, k, v, slot_q, slot_k, decay, write = given
    n = min(window, k.shape[2])
    late = (F.pad(x[:, :, : k.shape[2] - n], (0, 0, n, 0)) for x in (v, slot_k, decay, write))
    v, slot_k, decay, write = late
    return q, k, v, slot_q, slot_k, decay, write


def _has_slots(q: Tensor, k: Tensor, window: int, state: MemoryState | None, first: Tensor | None) -> Tensor:
    """Return whether each query reads a slot that something was written to, bool broadcast to [B, H, T, 1]."""
    places = torch.arange(k.shape[2] - q.shape[2], k.shape[2], device=q.device)
    if first is not None:
        return (places - first >= window)[:, None, :, None]
    has = (places >= window)[None, None, :, None]
    if state is None:
        return has
    held = (state.mass > 0).any(-1).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return has | held[:, :, None, None]
