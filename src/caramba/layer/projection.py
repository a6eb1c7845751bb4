"""Projections of attention: from features to scaled queries and the streams that a cache stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from caramba.cache.view import CacheView
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.documents import Documents
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.rope import RotaryEmbedding
from caramba.layer.score import CausalScore, Null
from caramba.ops.backend import upcast

Angles = tuple[Tensor, Tensor] | None
Queries = tuple[Tensor, Tensor]
"""Scaled queries for the two key parts of a cache, [B, H, T, ·] each."""


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Reshape [B, T, N*D] to [B, N, T, D]."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def select_rows(x: Tensor, rows: Tensor | None) -> Tensor:
    """Return the tokens `rows` int64 [B, n] of each sequence, or all if None. Shape: [B, T, M] -> [B, n, M]."""
    return x if rows is None else x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def angles_at(angles: Tensor, rows: Tensor | None) -> Tensor:
    """Return the cos or sin of the tokens `rows` int64 [B, n] of each sequence, or all if None.

    Shape: [G, T, P] or [B, G, T, P] -> [B, G, n, P].
    """
    if rows is None:
        return angles
    every = angles.expand(len(rows), *angles.shape[-3:])
    return every.gather(2, rows[:, None, :, None].expand(-1, every.shape[1], -1, every.shape[-1]))


class Projection(nn.Module):
    """Base class of attention projections: from features to scaled queries and the streams to cache.

    The score scale is 1/sqrt(query_dim), times exp(temperature) per head if `learned_temperature` is set. Scales and
    gates are applied to q in fp32 before the cast, so that the score op's own scale is 1.

    Shape: (x [B, T, M], offset) to (q [B, H, T, Dq], streams). Streams are the tensors to cache, by name; keys come
    after RoPE.

    Args of forward:
        offset: position of the first token, or of every token, [B, T].
        rows: int64 [B, n], the tokens of each sequence to return queries for, [B, H, n, Dq]; None for all.
        angles: cos and sin of the tokens, if the caller rotates the stream `rotated_stream` itself; that stream then
            comes back before RoPE.
    """

    rope: RotaryEmbedding | None
    rotated_stream: ClassVar[str] = "k_geo"
    """The stream that `rope` rotates."""

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__()
        self.dims = config.dims()
        self.query_dim = config.query_dim
        self.scale = 1.0 / math.sqrt(config.query_dim)
        self.temperature = (
            nn.Parameter(torch.zeros(self.dims.n_heads)) if config.learned_temperature else None
        )

    def reset_parameters(self) -> None:
        """Set the temperature to its neutral value."""
        if self.temperature is not None:
            nn.init.zeros_(self.temperature)

    def angles(self, offset: int | Tensor, n_tokens: int, device: torch.device) -> Angles:
        """Return cos and sin of the tokens' angles as `RotaryEmbedding` has them, None without RoPE."""
        return None if self.rope is None else self.rope(offset, n_tokens, device)

    @property
    def step_limit(self) -> int | None:
        """Maximum cache length for decode steps with device-side lengths, None if unlimited."""
        dynamic = None if self.rope is None else self.rope.dynamic
        return None if dynamic is None else dynamic.original_max_position_embeddings

    def step_refusal(self, limit: int) -> str | None:
        """Return why decode steps with device-side lengths do not support a cache of `limit` tokens, or None."""
        most = self.step_limit
        if most is not None and limit > most:
            return (
                f"rope_scaling type=dynamic beyond {most} tokens depends on the "
                f"length, which the host would have to know, and the cache holds {limit}"
            )
        return "keys of one feature have no two parts" if self.dims.qk < 2 else None

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys [B, K, S, Dqk] and values [B, K, S, Dv] for the score op."""
        raise NotImplementedError

    def attend(
        self,
        q: Tensor,
        streams: Mapping[str, Tensor],
        score: CausalScore,
        null: Null = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Return head outputs [B, H, T, value_dim]; `documents` are the documents that are attended to separately."""
        return score(q, *self.keys_values(streams), null, *bounds(documents))

    def cache_queries(self, q: Tensor) -> Queries:
        """Convert the queries of `forward` to the arguments of `attend_cache`."""
        raise NotImplementedError

    def attend_cache(self, q: Queries, keys: CacheView, window: int | None, null: Null = None) -> Tensor:
        """Attend to cached tokens in their storage format; return head outputs [B, H, T, value_dim]."""
        raise NotImplementedError

    def score_operands(self, q: Tensor, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return queries [B, H, T, W] and keys [B, K, S, W] whose products are the scores.

        Meant for few queries on many keys: nothing beyond the streams is computed per key.
        """
        return q, self.keys_values(streams)[0]

    def scale_queries(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Return q times the scale, computed in at least fp32, in `dtype`."""
        scaled = upcast(q) * self.scale
        if self.temperature is not None:
            scaled = scaled * upcast(self.temperature).exp()[:, None, None]
        return scaled if scaled.dtype == dtype else scaled.to(dtype)


def bounds(documents: Documents | None) -> tuple[Tensor | None, Tensor | None]:
    """Return what separates documents, as the score op takes it."""
    return (None, None) if documents is None else (documents.first, documents.starts)


def in_parts(q: Tensor, widths: tuple[int, int]) -> Queries:
    """Return queries [B, H, T, Dqk] as views on both parts of the keys, which are `widths` wide."""
    q_sem, q_geo = q.split(widths, dim=-1)
    return q_sem, q_geo


def attend_per_head(
    q: Queries, keys: CacheView, widths: tuple[int, int], kv_heads: int, window: int | None, null: Null
) -> Tensor:
    """Attend to keys in two parts of these widths and to values, per key/value head."""
    rows = None
    if null is not None:
        k, v = (row.view(kv_heads, -1) for row in null)
        rows = (*k.split(widths, dim=-1), v)
    return keys.attend(*q, ("k_sem", "k_geo", "v"), window=window, null=rows)


def head_norm(config: AttentionLayerConfig, width: int) -> nn.Module:
    """Return the norm of each head's queries or keys before RoPE, the identity without `qk_norm`."""
    return RMSNorm(width, config.qk_norm_eps) if config.qk_norm else nn.Identity()
