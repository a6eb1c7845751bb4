"""Self-attention: a projection, a score op and a cache, chosen when the layer is built."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext, LayerCache
from caramba.config.layer import AttentionLayerConfig, AttentionMode
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.layer.cache_rounding import CacheRounding
from caramba.layer.cache_view import CacheView
from caramba.layer.documents import Documents
from caramba.layer.projection import Projection
from caramba.layer.rms_norm import RMSNorm
from caramba.layer.score import CausalScore, Null
from caramba.layer.standard import StandardProjection
from caramba.ops import fused_decode_available
from caramba.ops.dba_decode import kernel_takes
from caramba.ops.decode_arguments import MAX_QUERIES


def build_projection(config: AttentionLayerConfig) -> Projection:
    """Return the projection of the config's mode.

    Raises:
        ConfigError: tied queries and keys of unequal head counts.
    """
    if config.is_latent:
        from caramba.layer.latent import LatentProjection  # loads the ops of its own

        return LatentProjection(config)
    if config.mode is not AttentionMode.DECOUPLED:
        return StandardProjection(config)
    dims = config.dims()
    if config.tie_qk and dims.n_kv_heads != dims.n_heads:
        raise ConfigError(
            f"AttentionLayer: tie_qk needs a key/value head per head, got n_kv_heads={dims.n_kv_heads} "
            f"and n_heads={dims.n_heads}; set n_kv_heads: {dims.n_heads} or tie_qk: false"
        )
    from caramba.layer.decoupled import DecoupledProjection

    return DecoupledProjection(config)


@functools.cache  # log once per dtype and width
def _log_unfused_decode(dtype: torch.dtype, width: int) -> None:
    logger.info(
        f"dba_decode: no kernel for {dtype} and streams of {width} per head; cached decode makes plain keys and values"
    )


class AttentionLayer(nn.Module):
    """Causal self-attention: o = W_o softmax(q k^T) v.

    `projection` computes q, k, v; `score` computes the softmax. With a context the layer appends its streams to a
    cache and the queries see every cached token; the first token's position is `ctx.position`. Without one the
    sequence starts at position 0. With `Documents` each document of a packed row is attended to separately. A
    `DeviceContext` runs one token per sequence without host-side lengths; attention dropout is not applied there.

    `null_attn` adds one learned key and value per key/value head, `null_k` [K*Dqk] and `null_v` [K*Dv]. Every
    query sees them as well as its tokens: before the first token, outside any window, and in each chunk of a decode.
    They have no position (RoPE and QK-norm skip them), belong to the weights and take no cache. Both
    start at zero, where a head that attends to nothing gives zero. A latent layer has them in its projection,
    as one latent and one geometric key.

    Shape: x [B, T, M] to [B, T, M]; `out` is [M, H*value_dim], with a bias under the latent layout unless `mla`.

    Raises:
        ConfigError: tied queries and keys of unequal head counts.

    Reference: Vaswani et al., 2017, arXiv:1706.03762; Ainslie et al., 2023, arXiv:2305.13245 (grouped
    queries).
    """

    residual_outputs: ClassVar[tuple[str, ...]] = ("out",)

    def __init__(self, config: AttentionLayerConfig) -> None:
        super().__init__()
        self.config = config
        self.dims = config.dims()
        self.projection = build_projection(config)
        self.cache_rounding = (
            None if config.cache_format is None else CacheRounding(config.cache_format, self.dims.streams)
        )
        self.score = CausalScore(config.local_window, config.dropout, config.q_chunk)
        has_bias = config.bias is True or (config.is_latent and not config.mla)
        self.out = nn.Linear(self.dims.n_heads * config.value_dim, config.d_model, bias=has_bias)
        kv_heads, has_null = self.dims.n_kv_heads, config.null_attn and not config.is_latent
        self.null_k = nn.Parameter(torch.zeros(kv_heads * self.dims.qk)) if has_null else None
        self.null_v = nn.Parameter(torch.zeros(kv_heads * self.dims.v)) if has_null else None

    def reset_parameters(self) -> None:
        """Set the null key and value to zero."""
        for parameter in (self.null_k, self.null_v):
            if parameter is not None:
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        return self.out(self.read(x, ctx))

    def read(
        self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None, norm: RMSNorm | None = None
    ) -> Tensor:
        """Return the concatenated head outputs, the input of `out`. Shape: [B, T, M] -> [B, T, H*value_dim].

        With a `norm`, x is a small batch before that norm.
        """
        if isinstance(ctx, DeviceContext):
            return self._step(x, ctx, norm)
        if isinstance(ctx, Documents):
            q, streams = self.projection(x, ctx.positions)
            streams = ctx.kept(self._stored(streams))
        else:
            q, streams = self.projection(x, 0 if ctx is None else ctx.position, norm=norm)
            streams = self._stored(streams)
            if ctx is not None:
                cache = ctx.next_cache()
                if self._is_fused(cache, q):
                    cache.write(streams)
                    stored = CacheView(cache.storage(), *ctx.lengths(cache), cache.n_tokens)
                    queries = self.projection.cache_queries(q)
                    heads = self.projection.attend_cache(queries, stored, self.score.window, self.null())
                    return heads.transpose(1, 2).flatten(2)
                streams = cache.append(streams)
        first, starts = (ctx.first, ctx.starts) if isinstance(ctx, Documents) else (None, None)
        heads = self.projection.attend(q, streams, self.score, self.null(), first, starts)
        return heads.transpose(1, 2).flatten(2)

    def _stored(self, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the streams as a cache of the layer's `cache_format` gives them back."""
        return streams if self.cache_rounding is None else self.cache_rounding(streams)

    def _step(self, x: Tensor, ctx: DeviceContext, norm: RMSNorm | None) -> Tensor:
        """Run a decode step with positions and lengths from device tensors."""
        cache, projection = ctx.next_cache(), self.projection
        reason = projection.step_refusal(ctx.limit)
        if x.shape[1] != ctx.width:
            reason = f"got {x.shape[1]} tokens per sequence, expected {ctx.width}"
        if reason is not None:
            raise ConfigError(f"decode step on the device: {reason}; decode with the context itself")
        rope = projection.rope
        key = None if rope is None else rope.key
        if key is None and (ctx.separate_ropes or not torch.compiler.is_compiling()):
            key = rope
        angles = None if key is None else ctx.angles.get(key)
        if angles is None:
            angles = projection.angles(ctx.offset, x.shape[1], x.device)
            if key is not None and angles is not None:
                ctx.angles[key] = angles
        q = projection.step(x, ctx.offset, angles, norm, cache, ctx.places)
        stored = CacheView(ctx.storage(cache), ctx.seqlens, ctx.packed, 0)
        heads = projection.attend_cache(q, stored, self.score.window, self.null())
        return heads.transpose(1, 2).flatten(2)

    def _is_fused(self, cache: LayerCache, q: Tensor) -> bool:
        """Whether these few queries can read the cache in the format that it is stored in.

        Not in a dtype or width beyond the kernels; gradients never get here, as a cache stores none.
        """
        has_dropout = self.training and self.score.dropout > 0
        needs_plain_attention = q.shape[2] > MAX_QUERIES or has_dropout
        return (
            not needs_plain_attention
            and fused_decode_available(cache, q.device)
            and self._is_narrow(q, cache)
        )

    @staticmethod
    def _is_narrow(q: Tensor, cache: LayerCache) -> bool:
        widths = [tensor.width for tensor in cache.tensors.values()]
        if kernel_takes(q.dtype, widths):
            return True
        if not torch.compiler.is_compiling():
            _log_unfused_decode(q.dtype, max(widths))
        return False

    def null(self) -> Null:
        """Return the learned null key and value, or None without `null_attn`."""
        return None if self.null_k is None or self.null_v is None else (self.null_k, self.null_v)
