"""Projections of attention: from features to scaled queries and the streams that a cache stores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from caramba.config.layer import AttentionLayerConfig
from caramba.layer.few_rows import normed
from caramba.layer.joined import Joined, prompt_product, usable
from caramba.layer.products import joined_product, products
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import CausalScore, Null
from caramba.layer.stored import StoredKeys
from caramba.ops import StoredStream, has_kernel, rope_qkv
from caramba.ops.widen import widened

Angles = tuple[Tensor, Tensor] | None
Queries = tuple[Tensor, Tensor]
"""Scaled queries on both parts of the keys that are stored, [B, H, T, ·] each."""


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """Reshape [B, T, N*D] to [B, N, T, D]."""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def picked(x: Tensor, rows: Tensor | None) -> Tensor:
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


def read_by(layer: nn.Linear, x: Tensor, norm: RMSNorm | None) -> Tensor:
    """Return what a layer makes of x, or of norm(x) where x comes before it."""
    return layer(x) if norm is None else normed(layer, x, norm)


class Projection(nn.Module):
    """What every projection shares: the score scale 1/sqrt(query_dim), times exp(temperature) per head when
    learned.

    A projection is a callable (x [B, T, M], offset) -> (q [B, H, T, Dq], streams): q carries every scale and
    gate, applied in fp32 before the cast, so that the score op's own scale is 1; streams are the tensors to
    cache, by name, keys after RoPE. `offset` is the position of the first token, or of every token, [B, T].
    `rows` int64 [B, n] asks for the queries of these tokens of each sequence only, [B, H, n, Dq]. Whoever gives the
    `angles` of these tokens turns the stream `turned` by them itself: it comes out before RoPE. With a `norm` x comes
    before it, as few rows, and `readers` normalise as they read.
    """

    rope: RotaryEmbedding | None
    turned: ClassVar[str] = "k_geo"
    """The stream that `rope` turns."""

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__()
        self.dims = config.dims()
        self.query_dim = config.query_dim
        self.scale = 1.0 / math.sqrt(config.query_dim)
        self.temperature = (
            nn.Parameter(torch.zeros(self.dims.n_heads)) if config.learned_temperature else None
        )

    def readers(self) -> tuple[nn.Module, ...] | None:
        """Return the linear layers that read x, None where something else reads it too."""
        raise NotImplementedError

    def reset_parameters(self) -> None:
        """Set the temperature to its neutral value."""
        if self.temperature is not None:
            nn.init.zeros_(self.temperature)

    def angles(self, offset: int | Tensor, n_tokens: int, device: torch.device) -> Angles:
        """Return cos and sin of the tokens' angles as `RotaryEmbedding` has them, None without RoPE."""
        return None if self.rope is None else self.rope(offset, n_tokens, device)

    @property
    def step_limit(self) -> int | None:
        """The most tokens of a cache on which steps run by themselves on the device, None without a bound."""
        dynamic = None if self.rope is None else self.rope.dynamic
        return None if dynamic is None else dynamic.original_max_position_embeddings

    def step_refusal(self, limit: int) -> str | None:
        """Return why steps on a cache of `limit` tokens cannot run by themselves on the device, None where they can."""
        most = self.step_limit
        if most is not None and limit > most:
            return (
                f"rope_scaling type=dynamic beyond {most} tokens depends on the "
                f"length, which the host would have to know, and the cache holds {limit}"
            )
        return "keys of one feature have no two parts" if self.dims.qk < 2 else None

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Join the streams to what the score op reads, keys [B, K, S, Dqk] and values [B, K, S, Dv]."""
        raise NotImplementedError

    def attend(
        self,
        q: Tensor,
        streams: Mapping[str, Tensor],
        score: CausalScore,
        null: Null = None,
        first: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """Return what each head reads, [B, H, T, value_dim]; `first` and `starts` as in the score op."""
        return score(q, *self.keys_values(streams), null, first, starts)

    def step(
        self, x: Tensor, offset: Tensor, angles: Angles, norm: RMSNorm | None
    ) -> tuple[Queries, dict[str, Tensor]]:
        """Return `stored_queries` and streams of a decode step's tokens; arguments are those of `forward`."""
        q, streams = self(x, offset, angles=angles, norm=norm)
        return self.stored_queries(q), streams

    def stored_queries(self, q: Tensor) -> Queries:
        """Return the queries that `forward` gives as `attend_stored` takes them."""
        raise NotImplementedError

    def attend_stored(self, q: Queries, keys: StoredKeys, window: int | None, null: Null = None) -> Tensor:
        """Return what each head reads, [B, H, T, value_dim], from the tokens in the format that they are stored in."""
        raise NotImplementedError

    def score_operands(self, q: Tensor, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return queries [B, H, T, W] and keys [B, K, S, W] whose products are the scores.

        Meant for few queries on many keys: nothing is made per key that the streams do not hold.
        """
        return q, self.keys_values(streams)[0]

    def scaled(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Return q times the scale, computed in at least fp32, in `dtype`."""
        scaled = widened(q) * self.scale
        if self.temperature is not None:
            scaled = scaled * widened(self.temperature).exp()[:, None, None]
        return scaled if scaled.dtype == dtype else scaled.to(dtype)


class StandardProjection(Projection):
    """Queries, keys and values of one width per head: standard, grouped-query and bottleneck attention.

    q [H*Dqk, M], k [K*Dqk, M], v [K*Dv, M]; `qk_norm` normalises each head's query and key before RoPE.
    """

    turned = "k"
    joins: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    joins_to_train: ClassVar[bool] = True

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        self.joined: Joined | None = None
        dims = self.dims
        self.q = nn.Linear(config.d_model, dims.n_heads * dims.qk, bias=bool(config.bias))
        self.k = nn.Linear(config.d_model, dims.n_kv_heads * dims.qk, bias=bool(config.bias))
        self.v = nn.Linear(config.d_model, dims.n_kv_heads * dims.v, bias=bool(config.bias))
        self.q_norm = _head_norm(config, dims.qk)
        self.k_norm = _head_norm(config, dims.qk)
        self.rope = (
            RotaryEmbedding(dims.rope, config.rope_base, config.rope_scaling) if config.rope_enabled else None
        )
        self.turns_together = not config.qk_norm

    def readers(self) -> tuple[nn.Module, ...] | None:
        return self.q, self.k, self.v

    def forward(
        self,
        x: Tensor,
        offset: int | Tensor = 0,
        rows: Tensor | None = None,
        angles: Angles = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        joined = self.joined
        if norm is not None:
            if joined is None:
                q, k, v = (normed(layer, x, norm) for layer in (self.q, self.k, self.v))
            else:
                q, k, v = normed(joined, x, norm).split_with_sizes(joined.widths, dim=-1)
        elif rows is None and usable(joined, x):
            if angles is None and self.turns_together:
                return self._together(joined, x, offset)
            q, k, v = joined(x)
        elif rows is None:
            together = self._product_to_turn(x) if angles is None else None
            if together is not None:
                return self._from_product(together, offset)
            q, k, v = products(x, (self.q, self.k, self.v))
        else:
            q, k, v = self.q(picked(x, rows)), self.k(x), self.v(x)
        q = self.q_norm(split_heads(q, self.dims.n_heads))
        k = self.k_norm(split_heads(k, self.dims.n_kv_heads))
        v = split_heads(v, self.dims.n_kv_heads)
        found = self.angles(offset, x.shape[1], x.device) if angles is None else angles
        if found is not None:
            cos, sin = found
            # Without a temperature the scale is one number, which the rotation takes along.
            is_plain = self.temperature is None
            dtype, scale = (v.dtype, self.scale) if is_plain else (None, 1.0)
            q = rotate(q, angles_at(cos, rows), angles_at(sin, rows), dtype, scale)
            k = k if angles is not None else rotate(k, cos, sin, v.dtype)
            if is_plain:
                return q, {"k": k.to(v.dtype), "v": v}
        return self.scaled(q, v.dtype), {"k": k.to(v.dtype), "v": v}

    def _together(self, joined: Joined, x: Tensor, offset: int | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """As `forward` without norms, queries and keys turned as heads of one tensor: half the calls of a step."""
        heads, kv_heads, width = self.dims.n_heads, self.dims.n_kv_heads, self.dims.qk
        n_turned, (batch, n_tokens, _) = heads + kv_heads, x.shape
        turned, v = joined.product(x).split_with_sizes([n_turned * width, kv_heads * self.dims.v], dim=-1)
        turned = turned.view(batch, n_tokens, n_turned, width).transpose(1, 2)
        v = v.view(batch, n_tokens, kv_heads, self.dims.v).transpose(1, 2)
        if self.rope is not None:
            turned = self.rope.turn(turned, offset)
        q, k = turned.split_with_sizes([heads, kv_heads], dim=1)
        return self.scaled(q, v.dtype), {"k": k.to(v.dtype), "v": v}

    def _product_to_turn(self, x: Tensor) -> Tensor | None:
        """Return q, k and v of x as one product, where a kernel turns and splits it and joins the gradients.

        The compiler would compute all three of them at every element of theirs.
        """
        is_plain = self.rope is not None and self.turns_together and self.temperature is None
        if not is_plain or self.dims.v != self.dims.qk or not has_kernel("rope_qkv", x):
            return None
        together = prompt_product(self.joined, x)
        return joined_product(x, (self.q, self.k, self.v)) if together is None else together

    def _from_product(self, together: Tensor, offset: int | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.rope is not None
        cos, sin = self.rope(offset, together.shape[1], together.device)
        q, k, v = rope_qkv(together, cos, sin, self.dims.n_heads, self.dims.n_kv_heads, self.scale)
        return q, {"k": k, "v": v}

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return streams["k"], streams["v"]

    def _key_parts(self) -> tuple[int, int]:
        """Return the widths in which the kernel reads keys, padded to powers of two: the first is the largest that
        leaves a rest."""
        sem = 1 << max((self.dims.qk - 1).bit_length() - 1, 0)
        return sem, self.dims.qk - sem

    def stored_queries(self, q: Tensor) -> Queries:
        return _parts(q, self._key_parts())

    def attend_stored(self, q: Queries, keys: StoredKeys, window: int | None, null: Null = None) -> Tensor:
        widths = self._key_parts()
        k = keys.streams["k"]
        parts = (StoredStream(k.kind, part) for part in k.values.split(widths, dim=-1))
        halves = dict(zip(("k_sem", "k_geo"), parts, strict=True))
        split = replace(keys, streams={**halves, "v": keys.streams["v"]})
        return _attend_per_head(q, split, widths, self.dims.n_kv_heads, window, null)


class GatedProjection(Projection):
    """A projection of two paths, semantic and geometric, that `decoupled_gate` weighs against each other.

    Per head by 2 s and 2 - 2 s with s = sigmoid(gate), neutral at gate = 0; `decoupled_gate_dynamic` adds a
    projection of x to the gate.
    """

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        heads = self.dims.n_heads
        self.gate = nn.Parameter(torch.zeros(heads)) if config.decoupled_gate else None
        self.gate_dynamic = (
            nn.Linear(config.d_model, heads, bias=False) if config.decoupled_gate_dynamic else None
        )

    def reset_parameters(self) -> None:
        """Set gate and temperature to their neutral values."""
        super().reset_parameters()
        if self.gate is not None:
            nn.init.zeros_(self.gate)
        if self.gate_dynamic is not None:
            nn.init.zeros_(self.gate_dynamic.weight)

    def _gated(self, x: Tensor, q_sem: Tensor, q_geo: Tensor) -> tuple[Tensor, Tensor]:
        """Return both paths' queries [B, H, T, D] times their weights, in at least fp32."""
        q_sem, q_geo = widened(q_sem), widened(q_geo)
        if self.gate is None:
            return q_sem, q_geo
        logits = widened(self.gate)[:, None, None]
        if self.gate_dynamic is not None:
            logits = logits + widened(self.gate_dynamic(x)).transpose(1, 2)[..., None]
        share = 2.0 * torch.sigmoid(logits)
        return q_sem * share, q_geo * (2.0 - share)

    def _joined(self, x: Tensor, q_sem: Tensor, q_geo: Tensor, dtype: torch.dtype, *beside: Tensor) -> Tensor:
        """Return the gated and scaled queries of both paths side by side, [B, H, T, Dsem + Dgeo] in `dtype`.

        Queries `beside` them, which no gate weighs, come behind.

        They are cast before they are joined, and joined in the order [B, T, H, ·] in which projections give and take
        heads: what fused backends return then follows it, and no copy turns outputs or gradients around.
        """
        parts = [
            self.scaled(part, dtype).transpose(1, 2) for part in (*self._gated(x, q_sem, q_geo), *beside)
        ]
        return torch.cat(parts, dim=-1).transpose(1, 2)


class DecoupledProjection(GatedProjection):
    """Semantic queries and keys without positions, geometric ones with RoPE, and values, per key/value head.

    score = (q_sem . k_sem + RoPE(q_geo) . RoPE(k_geo)) / sqrt(Dsem + Dgeo), which is the dot product of the
    concatenations. `tie_qk` takes the semantic key from the query's weights; `rope_semantic` rotates the
    semantic path too, by frequencies of its own width, so that every score then depends on the distance. The
    geometric frequencies are held per key/value head and are part of the state dict.

    q_sem [H*Dsem, M], q_geo [H*Dgeo, M], k_sem [K*Dsem, M], k_geo [K*Dgeo, M], v [K*Dv, M].
    """

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        dims = self.dims
        heads, kv_heads, geo = dims.n_heads, dims.n_kv_heads, dims.rope
        sem = dims.qk - geo
        self.q_sem = nn.Linear(config.d_model, heads * sem, bias=bool(config.bias))
        self.q_geo = nn.Linear(config.d_model, heads * geo, bias=bool(config.bias))
        self.k_sem = (
            None if config.tie_qk else nn.Linear(config.d_model, kv_heads * sem, bias=bool(config.bias))
        )
        self.k_geo = nn.Linear(config.d_model, kv_heads * geo, bias=bool(config.bias))
        self.v = nn.Linear(config.d_model, kv_heads * dims.v, bias=bool(config.bias))
        self.q_sem_norm, self.k_sem_norm = _head_norm(config, sem), _head_norm(config, sem)
        self.q_geo_norm, self.k_geo_norm = _head_norm(config, geo), _head_norm(config, geo)
        self.rope = (
            RotaryEmbedding(geo, config.rope_base, config.rope_scaling, n_groups=kv_heads, explicit=True)
            if config.rope_enabled
            else None
        )
        self.rope_sem = (
            RotaryEmbedding(sem, config.rope_base, config.rope_scaling) if config.rope_semantic else None
        )

    def readers(self) -> tuple[nn.Module, ...] | None:
        if self.gate_dynamic is not None:
            return None
        layers = (self.q_sem, self.q_geo, self.k_sem, self.k_geo, self.v)
        return tuple(layer for layer in layers if layer is not None)

    def forward(
        self,
        x: Tensor,
        offset: int | Tensor = 0,
        rows: Tensor | None = None,
        angles: Angles = None,
        norm: RMSNorm | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        heads, kv_heads = self.dims.n_heads, self.dims.n_kv_heads
        asking = picked(x, rows)
        sem = read_by(self.q_sem, asking, norm)
        q_sem = self.q_sem_norm(split_heads(sem, heads))
        if self.k_sem is not None:
            sem = read_by(self.k_sem, x, norm)
        elif rows is not None:
            sem = self.q_sem(x)
        k_sem = self.k_sem_norm(split_heads(sem, kv_heads))
        q_geo = self.q_geo_norm(split_heads(read_by(self.q_geo, asking, norm), heads))
        k_geo = self.k_geo_norm(split_heads(read_by(self.k_geo, x, norm), kv_heads))
        v = split_heads(read_by(self.v, x, norm), kv_heads)
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
        q = self._joined(asking, q_sem, q_geo, v.dtype)
        return q, {"k_sem": k_sem.to(v.dtype), "k_geo": k_geo.to(v.dtype), "v": v}

    def keys_values(self, streams: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        return torch.cat((streams["k_sem"], streams["k_geo"]), dim=-1), streams["v"]

    def stored_queries(self, q: Tensor) -> Queries:
        return _parts(q, (self.dims.qk - self.dims.rope, self.dims.rope))

    def attend_stored(self, q: Queries, keys: StoredKeys, window: int | None, null: Null = None) -> Tensor:
        widths = (self.dims.qk - self.dims.rope, self.dims.rope)
        return _attend_per_head(q, keys, widths, self.dims.n_kv_heads, window, null)


def _parts(q: Tensor, widths: tuple[int, int]) -> Queries:
    q_sem, q_geo = q.split(widths, dim=-1)
    return q_sem, q_geo


def _attend_per_head(
    q: Queries, keys: StoredKeys, widths: tuple[int, int], kv_heads: int, window: int | None, null: Null
) -> Tensor:
    """Attend to keys in two parts of these widths and to values, per key/value head."""
    rows = None
    if null is not None:
        k, v = (row.view(kv_heads, -1) for row in null)
        rows = (*k.split(widths, dim=-1), v)
    return keys.attend(*q, ("k_sem", "k_geo", "v"), window=window, null=rows)


def _head_norm(config: AttentionLayerConfig, width: int) -> nn.Module:
    return RMSNorm(width, config.qk_norm_eps) if config.qk_norm else nn.Identity()
