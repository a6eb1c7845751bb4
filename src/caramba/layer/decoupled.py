"""Decoupled attention: semantic keys without positions and geometric keys with RoPE, per key/value head."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from caramba.cache.view import CacheView
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.projection import (
    Angles,
    GatedProjection,
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


class DecoupledProjection(GatedProjection):
    """Semantic queries and keys without positions, geometric ones with RoPE, and values, per key/value head.

    score = (q_sem . k_sem + RoPE(q_geo) . RoPE(k_geo)) / sqrt(Dsem + Dgeo), which is the dot product of the
    concatenations. `tie_qk` takes the semantic key from the query's weights; `rope_semantic` rotates the
    semantic path too, by frequencies of its own width, so that every score then depends on the distance. The
    geometric frequencies are stored per key/value head and are part of the state dict.

    q_sem [H*Dsem, M], q_geo [H*Dgeo, M], k_sem [K*Dsem, M], k_geo [K*Dgeo, M], v [K*Dv, M].
    """

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        dims = self.dims
        heads, kv_heads, geo = dims.n_heads, dims.n_kv_heads, dims.rope
        sem = dims.qk - geo
        self.q_sem = nn.Linear(config.d_model, heads * sem, bias=bool(config.bias))
        self.q_geo = nn.Linear(config.d_model, heads * geo, bias=bool(config.bias))
        self.k_sem = None if config.tie_qk else nn.Linear(config.d_model, kv_heads * sem, bias=bool(config.bias))
        self.k_geo = nn.Linear(config.d_model, kv_heads * geo, bias=bool(config.bias))
        self.v = nn.Linear(config.d_model, kv_heads * dims.v, bias=bool(config.bias))
        self.q_sem_norm, self.k_sem_norm = head_norm(config, sem), head_norm(config, sem)
        self.q_geo_norm, self.k_geo_norm = head_norm(config, geo), head_norm(config, geo)
        self.rope = (
            RotaryEmbedding(geo, config.rope_base, config.rope_scaling, n_groups=kv_heads, explicit=True)
            if config.rope_enabled
            else None
        )
        self.rope_sem = RotaryEmbedding(sem, config.rope_base, config.rope_scaling) if config.rope_semantic else None

    def forward(
        self, x: Tensor, offset: int | Tensor = 0, rows: Tensor | None = None, angles: Angles = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        heads, kv_heads = self.dims.n_heads, self.dims.n_kv_heads
        asking = select_rows(x, rows)
        sem = self.q_sem(asking)
        q_sem = self.q_sem_norm(split_heads(sem, heads))
        if self.k_sem is not None:
            sem = self.k_sem(x)
        elif rows is not None:
            sem = self.q_sem(x)
        k_sem = self.k_sem_norm(split_heads(sem, kv_heads))
        q_geo = self.q_geo_norm(split_heads(self.q_geo(asking), heads))
        k_geo = self.k_geo_norm(split_heads(self.k_geo(x), kv_heads))
        v = split_heads(self.v(x), kv_heads)
        found = self.angles(offset, x.shape[1], x.device) if angles is None else angles
        if found is not None:
            cos, sin = found
            k_geo = k_geo if angles is not None else rotate(k_geo, cos, sin, v.dtype)
            repeats = heads // kv_heads
            cos, sin = angles_at(cos, rows), angles_at(sin, rows)
            q_geo = rotate(q_geo, cos.repeat_interleave(repeats, -3), sin.repeat_interleave(repeats, -3))
        if self.rope_sem is not None:
            cos, sin = self.rope_sem(offset, x.shape[1], x.device)
            q_sem, k_sem = rotate(q_sem, angles_at(cos, rows), angles_at(sin, rows)), rotate(k_sem, cos, sin)
        q = self._concatenate_paths(asking, q_sem, q_geo, v.dtype)
        return q, {"k_sem": k_sem.to(v.dtype), "k_geo": k_geo.to(v.dtype), "v": v}

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat((streams["k_sem"], streams["k_geo"]), dim=-1), streams["v"]

    def cache_queries(self, q: Tensor) -> Queries:
        return in_parts(q, (self.dims.qk - self.dims.rope, self.dims.rope))

    def attend_cache(self, q: Queries, keys: CacheView, window: int | None, null: Null = None) -> Tensor:
        widths = (self.dims.qk - self.dims.rope, self.dims.rope)
        return attend_per_head(q, keys, widths, self.dims.n_kv_heads, window, null)
