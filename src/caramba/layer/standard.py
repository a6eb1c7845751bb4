"""Attention with one width per head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from caramba.cache.view import ZERO_WIDTH, CacheView, zero_keys
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.projection import (
    Angles,
    Projection,
    Queries,
    angles_at,
    attend_per_head,
    head_norm,
    in_parts,
    select_rows,
    split_heads,
)
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import Null
from caramba.ops.dba_decode import StoredStream


class StandardProjection(Projection):
    """Queries, keys and values of one width per head: standard, grouped-query and bottleneck attention.

    q [H*Dqk, M], k [K*Dqk, M], v [K*Dv, M]; `qk_norm` normalises each head's query and key before RoPE.
    """

    rotated_stream = "k"

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        dims = self.dims
        self.q = nn.Linear(config.d_model, dims.n_heads * dims.qk, bias=bool(config.bias))
        self.k = nn.Linear(config.d_model, dims.n_kv_heads * dims.qk, bias=bool(config.bias))
        self.v = nn.Linear(config.d_model, dims.n_kv_heads * dims.v, bias=bool(config.bias))
        self.q_norm = head_norm(config, dims.qk)
        self.k_norm = head_norm(config, dims.qk)
        self.rope = (
            RotaryEmbedding(dims.rope, config.rope_base, config.rope_scaling) if config.rope_enabled else None
        )

    def forward(
        self, x: Tensor, offset: int | Tensor = 0, rows: Tensor | None = None, angles: Angles = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = self.linears(x, rows)
        q = self.q_norm(split_heads(q, self.dims.n_heads))
        k = self.k_norm(split_heads(k, self.dims.n_kv_heads))
        v = split_heads(v, self.dims.n_kv_heads)
        found = self.angles(offset, x.shape[1], x.device) if angles is None else angles
        if found is not None:
            cos, sin = found
            # Without a temperature the scale is one number, so the rotation applies it.
            is_plain = self.temperature is None
            dtype, scale = (v.dtype, self.scale) if is_plain else (None, 1.0)
            q = rotate(q, angles_at(cos, rows), angles_at(sin, rows), dtype, scale)
            k = k if angles is not None else rotate(k, cos, sin, v.dtype)
            if is_plain:
                return q, {"k": k.to(v.dtype), "v": v}
        return self.scale_queries(q, v.dtype), {"k": k.to(v.dtype), "v": v}

    def linears(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        """Return the queries of the tokens `rows`, and keys and values of all, before they are split into heads."""
        return self.q(select_rows(x, rows)), self.k(x), self.v(x)

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return streams["k"], streams["v"]

    def _key_parts(self) -> tuple[int, int]:
        """Return the two widths in which the kernel reads keys; the first is the largest power of two below Dqk."""
        sem = 1 << max((self.dims.qk - 1).bit_length() - 1, 0)
        return sem, self.dims.qk - sem

    def cache_queries(self, q: Tensor) -> Queries:
        """Return the queries, and a slice of them for the second key part, which is zeros for quantised keys."""
        return q, q[..., :ZERO_WIDTH]

    def attend_cache(self, q: Queries, keys: CacheView, window: int | None, null: Null = None) -> Tensor:
        k, v, kv_heads = keys.streams["k"], keys.streams["v"], self.dims.n_kv_heads
        if k.scales is None:
            widths = self._key_parts()
            queries = in_parts(q[0], widths)
            k_sem, k_geo = (StoredStream(k.kind, part) for part in k.values.split(widths, dim=-1))
        else:  # not every format can split a head's blocks in two
            queries, k_sem, k_geo = q, k, zero_keys(k, q[1].shape[-1])
            if null is not None:
                null_k = null[0].view(kv_heads, -1)
                null = torch.cat((null_k, null_k.new_zeros(kv_heads, q[1].shape[-1])), dim=-1), null[1]
            widths = (self.dims.qk, q[1].shape[-1])
        split = replace(keys, streams={"k_sem": k_sem, "k_geo": k_geo, "v": v})
        return attend_per_head(queries, split, widths, kv_heads, window, null)
