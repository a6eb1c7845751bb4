"""Attention with one width per head; uses fused QKV where that is faster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from caramba.config.layer import AttentionLayerConfig
from caramba.layer.cache_view import ZERO_WIDTH, CacheView, zero_keys
from caramba.layer.fused_linear import (
    FusedLinear,
    can_use_fused,
    fused_prefill_product,
    fused_product,
    norm_linear,
    products,
)
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
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.rope import RotaryEmbedding, rotate
from caramba.layer.score import Null
from caramba.ops import has_kernel
from caramba.ops.dba_decode import StoredStream
from caramba.ops.rope_qkv import rope_qkv


class StandardProjection(Projection):
    """Queries, keys and values of one width per head: standard, grouped-query and bottleneck attention.

    q [H*Dqk, M], k [K*Dqk, M], v [K*Dv, M]; `qk_norm` normalises each head's query and key before RoPE.
    """

    rotated_stream = "k"
    fusible_linears: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    fuse_in_training: ClassVar[bool] = True

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__(config)
        self.fused_linear: FusedLinear | None = None
        dims = self.dims
        self.q = nn.Linear(config.d_model, dims.n_heads * dims.qk, bias=bool(config.bias))
        self.k = nn.Linear(config.d_model, dims.n_kv_heads * dims.qk, bias=bool(config.bias))
        self.v = nn.Linear(config.d_model, dims.n_kv_heads * dims.v, bias=bool(config.bias))
        self.q_norm = head_norm(config, dims.qk)
        self.k_norm = head_norm(config, dims.qk)
        self.rope = (
            RotaryEmbedding(dims.rope, config.rope_base, config.rope_scaling) if config.rope_enabled else None
        )
        self.rotates_qk_together = not config.qk_norm

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
        fused_linear = self.fused_linear
        if norm is not None:
            if fused_linear is None:
                q, k, v = (norm_linear(layer, x, norm) for layer in (self.q, self.k, self.v))
            else:
                q, k, v = norm_linear(fused_linear, x, norm).split_with_sizes(fused_linear.widths, dim=-1)
        elif rows is None and can_use_fused(fused_linear, x):
            if angles is None and self.rotates_qk_together:
                return self._fused_qkv_rotated(fused_linear, x, offset)
            q, k, v = fused_linear(x)
        elif rows is None:
            together = self._fused_qkv(x) if angles is None else None
            if together is not None:
                return self._rotate_fused_qkv(together, offset)
            q, k, v = products(x, (self.q, self.k, self.v))
        else:
            q, k, v = self.q(select_rows(x, rows)), self.k(x), self.v(x)
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

    def _fused_qkv_rotated(
        self, fused_linear: FusedLinear, x: Tensor, offset: int | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Like `forward` without QK-norm; queries and keys are rotated as heads of one tensor, with half the calls."""
        heads, kv_heads, width = self.dims.n_heads, self.dims.n_kv_heads, self.dims.qk
        n_rotated, (batch, n_tokens, _) = heads + kv_heads, x.shape
        qk, v = fused_linear.product(x).split_with_sizes([n_rotated * width, kv_heads * self.dims.v], dim=-1)
        qk = qk.view(batch, n_tokens, n_rotated, width).transpose(1, 2)
        v = v.view(batch, n_tokens, kv_heads, self.dims.v).transpose(1, 2)
        if self.rope is not None:
            qk = self.rope.apply_rope(qk, offset)
        q, k = qk.split_with_sizes([heads, kv_heads], dim=1)
        return self.scale_queries(q, v.dtype), {"k": k.to(v.dtype), "v": v}

    def _fused_qkv(self, x: Tensor) -> Tensor | None:
        """Return the fused QKV output of x if a kernel rotates and splits it, else None.

        A compiler would compute each of the three gradients at every element of the fused gradient.
        """
        is_plain = self.rope is not None and self.rotates_qk_together and self.temperature is None
        if not is_plain or self.dims.v != self.dims.qk or not has_kernel("rope_qkv", x):
            return None
        together = fused_prefill_product(self.fused_linear, x)
        return fused_product(x, (self.q, self.k, self.v)) if together is None else together

    def _rotate_fused_qkv(self, together: Tensor, offset: int | Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        assert self.rope is not None
        cos, sin = self.rope(offset, together.shape[1], together.device)
        q, k, v = rope_qkv(together, cos, sin, self.dims.n_heads, self.dims.n_kv_heads, self.scale)
        return q, {"k": k, "v": v}

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
