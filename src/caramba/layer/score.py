"""The score op: causal softmax attention of scaled queries over all keys that are cached."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HALF_PRECISION = (torch.float16, torch.bfloat16)


class CausalScore(nn.Module):
    """Attend: o = softmax(q k^T + mask) v, causal, over at most the last `window` keys (the query's own
    included).

    Queries arrive scaled, so the op's own scale is 1. The T queries are the last T of the S positions: query
    t has position S - T + t, with a cache or without. Query heads share key/value heads in consecutive groups
    of H/K. `dropout` zeroes attention probabilities in training.

    Shape: q [B, H, T, Dqk], k [B, K, S, Dqk], v [B, K, S, Dv], returns [B, H, T, Dv] in q's dtype; k and v
    may come in another dtype, that of a cache.
    """

    def __init__(self, window: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_queries, n_keys = q.shape[2], k.shape[2]
        if self.window is not None and n_keys > self.window + n_queries - 1:
            # Keys that even the first query no longer sees.
            n_keys = self.window + n_queries - 1
            k, v = k[:, :, -n_keys:], v[:, :, -n_keys:]
        k, v = k.to(q.dtype), v.to(q.dtype)
        dropout = self.dropout if self.training else 0.0
        if n_queries == 1:
            return _attend_single(q, k, v, dropout)
        return _attend(q, k, v, self._mask(n_queries, n_keys, q.device), dropout)

    def _mask(self, n_queries: int, n_keys: int, device: torch.device) -> Tensor | None:
        """Return which keys each query sees, [T, S], or None where plain causality says it all."""
        window = n_keys if self.window is None else self.window
        if n_queries == n_keys and window >= n_keys:
            return None
        last = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
        keys = torch.arange(n_keys, device=device)
        return (keys <= last) & (keys > last - window)

    def extra_repr(self) -> str:
        return f"window={self.window}, dropout={self.dropout}"


def _attend_single(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attend from one query per sequence to every key: the heads of a group become queries of one head."""
    batch, n_heads, _, width = q.shape
    n_kv_heads = k.shape[1]
    grouped = q.reshape(batch, n_kv_heads, n_heads // n_kv_heads, width)
    out = F.scaled_dot_product_attention(grouped, k, v, dropout_p=dropout, scale=1.0)
    return out.reshape(batch, n_heads, 1, v.shape[-1])


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    groups, v_width = q.shape[1] // k.shape[1], v.shape[-1]
    # Fused backends want one width; zero features change neither the score nor the kept part of the output.
    width = max(q.shape[-1], v_width)
    q, k, v = (_widen(x, width) for x in (q, k, v))
    # Only the 16-bit backends read grouped heads themselves, and only without a mask.
    is_grouped = groups > 1 and mask is None and q.dtype in HALF_PRECISION
    if groups > 1 and not is_grouped:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=1.0, enable_gqa=is_grouped
    )
    return out[..., :v_width]


def _widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
