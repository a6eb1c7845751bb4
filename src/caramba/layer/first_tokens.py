"""Exact first tokens: full-width keys and values next to a narrow cache, in one softmax over both."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.config.attention_dims import align_width
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.projection import angles_at, split_heads
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import CausalScore
from caramba.ops.backend import upcast

TWO_WIDTHS_LIMIT = 128


class FirstTokens(nn.Module):
    """Keys and values of the first n tokens of a sequence, as in grouped-query attention.

    score(t, u < n) = (RoPE_t(q_h) . RoPE_u(k_g,u) - q_h . mean_g) / sqrt(D), with q_h the same D wide query that the
    maps into the latent read, g the key/value head of head h, and RoPE over all of D by frequencies of its own, which
    are part of the state dict. `key_mean` is what surgery takes from the keys of the *other* tokens by centring
    them: a constant of each query, which the softmax over them alone would not see. Values lack the mean that surgery
    puts into the output's bias.

    Surgery copies the teacher's weights. They stay trainable: the queries are shared, so frozen keys would no longer
    match them.

    Shape: k [K*D, M], v [K*D, M] with a bias, `key_mean` [K*D].

    Reference: Xiao et al., 2023, arXiv:2309.17453 (first tokens as attention sinks).
    """

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__()
        dims, width = config.dims(), config.query_dim
        self.n_tokens, self.n_kv_heads = dims.first_tokens, dims.n_kv_heads
        self.k = nn.Linear(config.d_model, dims.n_kv_heads * width, bias=bool(config.bias))
        self.v = nn.Linear(config.d_model, dims.n_kv_heads * width)
        self.key_mean = nn.Parameter(torch.zeros(dims.n_kv_heads * width))
        self.rope = (
            RotaryEmbedding(width, config.rope_base, config.rope_scaling, explicit=True)
            if config.rope_enabled
            else None
        )

    def reset_parameters(self) -> None:
        """Set the mean to zero."""
        nn.init.zeros_(self.key_mean)

    def forward(
        self, x: Tensor, q: Tensor, offset: int | Tensor = 0, rows: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the queries q [B, H, T, D] after RoPE, and the streams of the tokens among the first n.

        Queries of the tokens `rows` int64 [B, n] alone are [B, H, n, D].

        With the position of every token, [B, T], where documents begin anywhere, the streams are those of all tokens.
        """
        n = x.shape[1] if isinstance(offset, Tensor) else min(max(self.n_tokens - offset, 0), x.shape[1])
        k, v = split_heads(self.k(x[:, :n]), self.n_kv_heads), split_heads(self.v(x[:, :n]), self.n_kv_heads)
        if self.rope is not None:
            cos, sin = self.rope(offset, x.shape[1], x.device)
            q = rotate(q, angles_at(cos, rows), angles_at(sin, rows))
            k = rotate(k, cos[..., :n, :], sin[..., :n, :])
        return q, {"k_first": k.to(v.dtype), "v_first": v}

    def scores(self, q: Tensor, q_sem: Tensor, k: Tensor) -> Tensor:
        """Return scores [B, H, T, S] of scaled queries on keys k [B, K, S, D], without the causal mask."""
        return first_scores(q, q_sem, k, self.key_mean.view(self.n_kv_heads, -1))

    def read(
        self, q: Tensor, q_sem: Tensor, k: Tensor, v: Tensor, n_keys: int, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend to the first tokens only, see `read_first`."""
        mean = self.key_mean.view(self.n_kv_heads, -1)
        return read_first(q, q_sem, k, v, mean, self.n_tokens, n_keys, first)

    def join(
        self,
        score: CausalScore,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: Tensor,
        total: Tensor,
        first: Tensor | None = None,
    ) -> Tensor:
        """Attend to all later tokens in one softmax with the first, whose output is `kept`, log-sum-exp `total`.

        Shape: as in `attend_with_prefix`, kept [B, H, T, Dv]; returns [B, H, T, Dv].
        """
        read, share = attend_with_prefix(score, q, k, v, total, self.n_tokens, first)
        return read + (share * kept).to(read.dtype)


def first_scores(q: Tensor, q_sem: Tensor, k: Tensor, mean: Tensor) -> Tensor:
    """Return q . k - q_sem . mean of every head, in at least fp32, also under autocast.

    Shape: q and q_sem [B, H, T, D], mean [K, D], k [B, K, S, D] to [B, H, T, S], or a set of keys for each query,
    [B, K, T, n, D], to [B, H, T, n].
    """
    with torch.autocast(q.device.type, enabled=False):
        grouped, semantic = (upcast(x).unflatten(1, (mean.shape[0], -1)) for x in (q, q_sem))
        shift = torch.einsum("bkgtd,kd->bkgt", semantic, mean.to(semantic.dtype))
        scores = _per_group(grouped, k.to(grouped.dtype).mT)
        return (scores - shift[..., None]).flatten(1, 2)


def read_first(
    q: Tensor,
    q_sem: Tensor,
    k: Tensor,
    v: Tensor,
    mean: Tensor,
    n_tokens: int,
    n_keys: int,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally to the first `n_tokens` only; return outputs [B, H, T, D] and log-sum-exp [B, H, T, 1].

    The T queries are the last of `n_keys` positions, k and v [B, K, S, D] those of the first tokens so far. With
    `first` [B, T], the place in the row where each query's document begins, k and v are those of all T tokens.
    Returns at least fp32.
    """
    n_queries = q.shape[2]
    last = torch.arange(n_keys - n_queries, n_keys, device=q.device)[:, None]
    if first is None:
        hidden = torch.arange(k.shape[2], device=q.device) > last
    else:
        places = first[:, :, None] + torch.arange(n_tokens, device=q.device)
        hidden = (places > last)[:, None]
        rows = torch.arange(len(first), device=q.device)[:, None, None]
        places = places.clamp_max(n_queries - 1)
        k, v = (x.transpose(1, 2)[rows, places].permute(0, 3, 1, 2, 4) for x in (k, v))
    scores = first_scores(q, q_sem, k, mean).masked_fill(hidden, float("-inf"))
    total = scores.logsumexp(-1, keepdim=True)
    with torch.autocast(q.device.type, enabled=False):
        weights = (scores - total).exp().unflatten(1, (mean.shape[0], -1))
        return _per_group(weights, v.to(weights.dtype)).flatten(1, 2), total


def _per_group(x: Tensor, matrix: Tensor) -> Tensor:
    """Multiply [B, K, G, T, n] by a matrix of each group, [B, K, n, m], or of each of its queries, [B, K, T, n, m]."""
    if matrix.dim() == 4:
        return (x.flatten(2, 3) @ matrix).unflatten(2, x.shape[2:4])
    return (x.transpose(2, 3) @ matrix).transpose(2, 3)


def attend_with_prefix(
    score: CausalScore,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    total: Tensor,
    n_tokens: int,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to all tokens after a prefix, in one softmax with the prefix's log-sum-exp `total`.

    To a query, the prefix acts as one key that scores `total`. So `total` becomes a query feature that only this key
    reads, split in two for half precision. The key's value is an indicator that yields the prefix's share of the
    attention. This takes one fused call of the score op with a few extra features.

    Shape: q [B, H, T, Dq], k [B, K, S, Dq] and v [B, K, S, Dv] of all positions, total [B, H, T, 1]; returns the
    weighted output of the other tokens [B, H, T, Dv], and the prefix's share [B, H, T, 1]. v may be k itself.
    """
    high = total.to(q.dtype)
    q = _pad_to(torch.cat((q, high, (total - high).to(q.dtype)), dim=-1), q.shape[-1] + 2)
    width, v_width = k.shape[-1], v.shape[-1]
    is_one = v is k
    k = _pad_to(k.to(q.dtype), width + 2)
    # Only cuDNN takes two widths, and none above 128: beyond it flash attention wants one.
    v_columns = v_width + 1 if k.shape[-1] <= TWO_WIDTHS_LIMIT else k.shape[-1]
    v = k if is_one else _pad_to(v.to(q.dtype), v_columns)
    key, value = q.new_zeros(k.shape[-1]), q.new_zeros(v.shape[-1])
    key[width : width + 2] = 1.0
    value[v_width] = 1.0
    if first is not None:
        null = key.repeat(k.shape[1]), value.repeat(v.shape[1])
        out = score(q, k, v, null, first + n_tokens)
        return out[..., :v_width], out[..., v_width : v_width + 1]
    n_queries, n_keys = q.shape[2], k.shape[2]
    early = min(max(n_tokens - (n_keys - n_queries), 0), n_queries)  # they see first tokens only
    if early == n_queries:
        return q.new_zeros(*q.shape[:3], v_width), q.new_ones(*q.shape[:3], 1)
    q, k, v = q[:, :, early:], k[:, :, n_tokens:], v[:, :, n_tokens:]
    k = torch.cat((_row(key, k), k), dim=2)
    v = k if is_one else torch.cat((_row(value, v), v), dim=2)
    if q.shape[2] == k.shape[2] - 1 and q.shape[2] > 1:
        # A query for that key as well makes this plain causality, which needs no mask.
        out = score(F.pad(q, (0, 0, 1, 0)), k, v)[:, :, 1:]
    else:
        out = score(q, k, v)
    read, share = out[..., :v_width], out[..., v_width : v_width + 1]
    return F.pad(read, (0, 0, early, 0)), F.pad(share, (0, 0, early, 0), value=1.0)


def _pad_to(x: Tensor, width: int) -> Tensor:
    """Pad x with zero features to `width`, rounded up to the alignment of fused backends."""
    return F.pad(x, (0, align_width(width) - x.shape[-1]))


def _row(one: Tensor, x: Tensor) -> Tensor:
    return one.expand(*x.shape[:2], 1, -1)
