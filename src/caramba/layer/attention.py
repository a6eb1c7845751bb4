"""Self-attention: a projection, a score op and a cache, chosen when the layer is built."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.config.kvcache import BLOCKS, KVCacheKind, Streams, kind_of_stream
from caramba.config.layer import AttentionLayerConfig, AttentionMode
from caramba.errors import ConfigError
from caramba.layer.documents import Documents
from caramba.layer.projection import Projection, StandardProjection
from caramba.layer.score import CausalScore, Null
from caramba.ops.formats import round_to_blocks


class CacheRounding(nn.Module):
    """Round every stream of an attention layer to a quantised cache format, with a straight-through gradient.

    Training and one forward over a whole text then read what a cache of this format stores, and the weights adapt to
    it. Blocks run over the features of all heads, as in the cache. The backward pass treats the rounding as the
    identity. Exact first tokens are not rounded, and neither are the most recent tokens of a cache in decoding.

    Shape: each stream [B, K, T, D] to the same, dtype unchanged.

    Reference: Bengio et al., 2013, arXiv:1308.3432 (straight-through estimator).
    """

    def __init__(self, kind: KVCacheKind, streams: Streams) -> None:
        super().__init__()
        kinds = {name: kind_of_stream(kind, name) for name, _, _ in streams}
        self.formats = {name: (str(kind), BLOCKS[kind].elements) for name, kind in kinds.items()}

    def forward(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._rounded(x, *self.formats[name]) if name in self.formats else x for name, x in streams.items()
        }

    @staticmethod
    def _rounded(x: Tensor, kind: str, elements: int) -> Tensor:
        rows = x.detach().transpose(1, 2).flatten(2)
        rounded = round_to_blocks(rows, kind, elements).unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)
        # The difference is exactly zero: it adds the gradient of the identity and no rounding of its own.
        return rounded + (x - x.detach())


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

    def read(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        """Return the concatenated head outputs, the input of `out`. Shape: [B, T, M] -> [B, T, H*value_dim]."""
        if isinstance(ctx, DeviceContext):
            self.check_step(ctx, x.shape[1])
        q, streams = self.projection(x, 0 if ctx is None else ctx.offset)
        if isinstance(ctx, DeviceContext):
            queries, stored = self.projection.cache_queries(q), ctx.write(streams)
            heads = self.projection.attend_cache(queries, stored, self.score.window, self.null())
            return heads.transpose(1, 2).flatten(2)
        streams = self.round_streams(streams)
        documents = ctx if isinstance(ctx, Documents) else None
        if isinstance(ctx, Documents):
            streams = ctx.kept(streams)
        elif ctx is not None:
            streams = ctx.next_cache().append(streams)
        heads = self.projection.attend(q, streams, self.score, self.null(), documents)
        return heads.transpose(1, 2).flatten(2)

    def round_streams(self, streams: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the streams as a cache of the layer's `cache_format` gives them back."""
        return streams if self.cache_rounding is None else self.cache_rounding(streams)

    def check_step(self, ctx: DeviceContext, n_tokens: int) -> None:
        """Check that a decode step of `n_tokens` tokens per sequence can run with lengths on the device.

        Raises:
            ConfigError: another number of tokens than the context's, or positions that the host must count.
        """
        reason = self.projection.step_refusal(ctx.limit)
        if n_tokens != ctx.width:
            reason = f"got {n_tokens} tokens per sequence, expected {ctx.width}"
        if reason is not None:
            raise ConfigError(f"decode step on the device: {reason}; decode with the context itself")

    def null(self) -> Null:
        """Return the learned null key and value, or None without `null_attn`."""
        return None if self.null_k is None or self.null_v is None else (self.null_k, self.null_v)
