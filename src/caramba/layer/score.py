"""The score op: causal softmax attention of scaled queries over all keys that are cached."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from caramba.layer.varlen import VarlenKernel, active_kernel

HALF_PRECISION = (torch.float16, torch.bfloat16)
Null = tuple[Tensor, Tensor] | None
"""A key [K*Dqk] and a value [K*Dv] that belong to no position."""

LOWER_RIGHT_ON = ("cuda",)
"""Devices whose backends support lower-right causality (the last T of S positions) without a mask [T, S]."""


TWO_WIDTHS = (
    False  # whether the leading fused backend takes values of another width than keys, see backends.py
)


class CausalScore(nn.Module):
    """Attend: o = softmax(q k^T + mask) v, causal, over at most the last `window` keys (the query's own
    included).

    Queries arrive scaled, so the op's own scale is 1. The T queries are the last T of the S positions: query
    t has position S - T + t, with a cache or without. Query heads share key/value heads in consecutive groups
    of H/K. `dropout` zeroes attention probabilities in training.

    `q_chunk` attends from that many queries at a time, each chunk to the keys that it sees: the same numbers,
    with scores and masks of [q_chunk, S] in place of [T, S].

    Shape: q [B, H, T, Dqk], k [B, K, S, Dqk], v [B, K, S, Dv], returns [B, H, T, Dv] in q's dtype; k and v
    may come in another dtype, that of a cache. `null`, when given, is a key [K*Dqk] and a value [K*Dv] that
    belong to no position: every query sees them, whatever its window. `first`, when given, is the first key that
    each query may see, int64 [B, T] (see `Documents`), and then S = T. `starts` gives the same documents as offsets;
    an active variable-length kernel then computes the attention if it supports the call: no null key, no dropout,
    16 bits and at most 256 features.
    """

    def __init__(self, window: int | None = None, dropout: float = 0.0, q_chunk: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout
        self.q_chunk = q_chunk

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        null: Null = None,
        first: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        if starts is not None:
            kernel = self.varlen_kernel(q, v, null, starts)
            if kernel is not None:
                return kernel.attend(q, k.to(q.dtype), v.to(q.dtype), starts, self.window)
        n_queries, n_keys = q.shape[2], k.shape[2]
        size = self.q_chunk
        if size is None or n_queries <= size:
            return self._chunk(q, k, v, null, first)
        before = n_keys - n_queries
        outputs = []
        for start in range(0, n_queries, size):
            end = min(start + size, n_queries)
            lowest = None if first is None else first[:, start:end]
            seen = before + end
            outputs.append(self._chunk(q[:, :, start:end], k[:, :, :seen], v[:, :, :seen], null, lowest))
        return torch.cat(outputs, dim=2)

    def varlen_kernel(self, q: Tensor, v: Tensor, null: Null, starts: Tensor | None) -> VarlenKernel | None:
        """Return the variable-length kernel for attention within documents, or None if a mask is needed."""
        if starts is None or null is not None or (self.training and self.dropout > 0):
            return None
        kernel = active_kernel(q.device)
        return kernel if kernel is not None and kernel.serves(q, v, self.window) else None

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, null: Null, first: Tensor | None) -> Tensor:
        n_queries, n_keys = q.shape[2], k.shape[2]
        if self.window is not None and n_keys > self.window + n_queries - 1:
            # Keys that even the first query no longer sees.
            left_out = n_keys - (self.window + n_queries - 1)
            n_keys -= left_out
            k, v = k[:, :, -n_keys:], v[:, :, -n_keys:]
            first = None if first is None else first - left_out
        if k.dtype != q.dtype or v.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        if null is not None:
            k, v = _prepend(null[0], k), _prepend(null[1], v)
        dropout = self.dropout if self.training else 0.0
        if n_queries == 1 and first is None:
            return _attend_single(q, k, v, dropout)
        if self._is_lower_right(q, n_keys, null, first):
            return _attend_lower_right(q, k, v, dropout)
        return _attend(q, k, v, self._mask(n_queries, n_keys, null is not None, first, q.device), dropout)

    def _is_lower_right(self, q: Tensor, n_keys: int, null: Null, first: Tensor | None) -> bool:
        """True if lower-right causality suffices, so that a backend flag replaces the mask."""
        return (
            q.device.type in LOWER_RIGHT_ON
            and q.shape[2] < n_keys
            and (self.window is None or self.window >= n_keys)
            and null is None
            and first is None
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def _mask(
        self, n_queries: int, n_keys: int, has_null: bool, first: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return the mask of keys that each query sees, [T, S], or None if plain causality suffices.

        With `first` it is [B, 1, T, S]. The null key comes first: [..., 1 + S].
        """
        window = n_keys if self.window is None else self.window
        if n_queries == n_keys and window >= n_keys and not has_null and first is None:
            return None
        last = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
        keys = torch.arange(n_keys, device=device)
        mask = (keys <= last) & (keys > last - window)
        if first is not None:
            mask = (mask & (keys >= first[:, :, None]))[:, None]
        return F.pad(mask, (1, 0), value=True) if has_null else mask

    def extra_repr(self) -> str:
        chunk = "" if self.q_chunk is None else f", q_chunk={self.q_chunk}"
        return f"window={self.window}, dropout={self.dropout}{chunk}"


def _prepend(null: Tensor, x: Tensor) -> Tensor:
    """Put one row per head, from [K*D], before the tokens of [B, K, S, D]."""
    batch, heads, _, width = x.shape
    return torch.cat((null.to(x.dtype).view(1, heads, 1, width).expand(batch, -1, -1, -1), x), dim=2)


def _attend_single(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attend from one query per sequence to every key: the heads of a group become queries of one head."""
    batch, n_heads, _, width = q.shape
    n_kv_heads = k.shape[1]
    grouped = q.reshape(batch, n_kv_heads, n_heads // n_kv_heads, width)
    out = F.scaled_dot_product_attention(grouped, k, v, dropout_p=dropout, scale=1.0)
    return out.reshape(batch, n_heads, 1, v.shape[-1])


def supports_two_widths(q: Tensor) -> bool:
    """True if the leading fused backend takes values of another width than keys."""
    return TWO_WIDTHS and q.is_cuda and q.dtype in HALF_PRECISION


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    groups, v_width = q.shape[1] // k.shape[1], v.shape[-1]
    if not supports_two_widths(q):
        # Fused backends want one width; zero features change neither the score nor the kept part of the output.
        width = max(q.shape[-1], v_width)
        q, k, v = (_widen(x, width) for x in (q, k, v))
    # Only the 16-bit backends read grouped heads themselves, and only without a mask.
    is_grouped = groups > 1 and mask is None and q.dtype in HALF_PRECISION
    if groups > 1 and not is_grouped:
        k, v = _repeat(k, groups), _repeat(v, groups)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=1.0, enable_gqa=is_grouped
    )
    return out[..., :v_width]


def _attend_lower_right(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attend from the last T of S positions; flash reads grouped heads, others one for each query head."""
    from torch.nn.attention.bias import causal_lower_right  # which loads torch's compiler

    groups, v_width = q.shape[1] // k.shape[1], v.shape[-1]
    width = max(q.shape[-1], v_width)
    q, k, v = (_widen(x, width) for x in (q, k, v))
    is_grouped = groups > 1 and can_use_flash_attention(SDPAParams(q, k, v, None, dropout, False, True))
    if groups > 1 and not is_grouped:
        k, v = _repeat(k, groups), _repeat(v, groups)
    bias: Any = causal_lower_right(q.shape[2], k.shape[2])
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0, enable_gqa=is_grouped
    )
    return out[..., :v_width]


def _repeat(x: Tensor, groups: int) -> Tensor:
    """Give every query head its key/value head, without a copy where all read the same one."""
    return x.expand(-1, groups, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(groups, dim=1)


def _widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
