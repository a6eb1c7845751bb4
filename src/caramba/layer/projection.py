"""Projections of attention: from features to scaled queries and the streams that a cache stores."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from caramba.cache.view import ZERO_WIDTH, CacheView, zero_keys
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.documents import Documents
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import CausalScore, Null
from caramba.ops.backend import upcast
from caramba.ops.dba_decode import StoredStream

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
        self.temperature = nn.Parameter(torch.zeros(self.dims.n_heads)) if config.learned_temperature else None

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


class GatedProjection(Projection):
    """A projection of two paths, semantic and geometric, that `decoupled_gate` weighs against each other.

    Per head by 2 s and 2 - 2 s with s = sigmoid(gate), neutral at gate = 0; `decoupled_gate_dynamic` adds a
    projection of x to the gate.
    """

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        heads = self.dims.n_heads
        self.gate = nn.Parameter(torch.zeros(heads)) if config.decoupled_gate else None
        self.gate_dynamic = nn.Linear(config.d_model, heads, bias=False) if config.decoupled_gate_dynamic else None

    def reset_parameters(self) -> None:
        """Set gate and temperature to their neutral values."""
        super().reset_parameters()
        if self.gate is not None:
            nn.init.zeros_(self.gate)
        if self.gate_dynamic is not None:
            nn.init.zeros_(self.gate_dynamic.weight)

    def _apply_gates(self, x: Tensor, q_sem: Tensor, q_geo: Tensor) -> tuple[Tensor, Tensor]:
        """Return both paths' queries [B, H, T, D] times their weights, in at least fp32."""
        q_sem, q_geo = upcast(q_sem), upcast(q_geo)
        if self.gate is None:
            return q_sem, q_geo
        logits = upcast(self.gate)[:, None, None]
        if self.gate_dynamic is not None:
            logits = logits + upcast(self.gate_dynamic(x)).transpose(1, 2)[..., None]
        share = 2.0 * torch.sigmoid(logits)
        return q_sem * share, q_geo * (2.0 - share)

    def _concatenate_paths(self, x: Tensor, q_sem: Tensor, q_geo: Tensor, dtype: torch.dtype, *extra: Tensor) -> Tensor:
        """Return the gated and scaled queries of both paths concatenated, [B, H, T, Dsem + Dgeo] in `dtype`.

        Ungated queries `extra` are appended.

        They are cast first and concatenated in the projections' memory order [B, T, H, ·], which fused backends keep in
        their output, so that no transposing copy is needed.
        """
        parts = [
            self.scale_queries(part, dtype).transpose(1, 2) for part in (*self._apply_gates(x, q_sem, q_geo), *extra)
        ]
        return torch.cat(parts, dim=-1).transpose(1, 2)


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
        self.rope = RotaryEmbedding(dims.rope, config.rope_base, config.rope_scaling) if config.rope_enabled else None

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
