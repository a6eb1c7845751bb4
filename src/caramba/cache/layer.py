"""Caches of one attention application: a fixed set of streams that grow together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from caramba.cache.tensor import KVCacheTensor, KVCacheTensorConfig
from caramba.config.kvcache import KVCacheKind, Streams, kind_of_stream
from caramba.config.layer import AttentionDims
from caramba.errors import ConfigError


class LayerCache:
    """Streams of one attention application, by name; all hold the same number of tokens."""

    names: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        streams: Streams,
        *,
        batch_size: int,
        max_tokens: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: torch.device | str = "cpu",
        static: bool = False,
    ) -> None:
        got = tuple(name for name, _, _ in streams)
        if got != self.names:
            raise ConfigError(
                f"{type(self).__name__}: got streams {got}, expected {self.names}; use new_layer_cache()"
            )
        self._tensors = {
            name: KVCacheTensor(
                KVCacheTensorConfig(kind_of_stream(kind, name)),
                batch_size=batch_size,
                n_heads=n_heads,
                width=width,
                max_tokens=max_tokens,
                device=device,
                static=static,
            )
            for name, n_heads, width in streams
        }

    @property
    def n_tokens(self) -> int:
        """Tokens stored per sequence. Inside a forward, those of the streams appended so far."""
        return min(tensor.n_tokens for tensor in self._tensors.values())

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocated buffers."""
        return sum(tensor.allocated_bytes for tensor in self._tensors.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the stored tokens."""
        return sum(tensor.used_bytes for tensor in self._tensors.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes, all streams together."""
        return sum(tensor.bytes_per_token for tensor in self._tensors.values())

    def stream(self, name: str) -> KVCacheTensor:
        """Return the storage of one stream."""
        return self._tensors[name]

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store the next tokens of every stream and return all tokens stored, the new ones included.

        Shape: in [B, K, T, D] per stream, out [B, K, S, D] with S = tokens before + T, in the storage dtype.
        """
        if set(streams) != set(self._tensors):
            raise ConfigError(
                f"{type(self).__name__}: got streams {sorted(streams)}, expected {sorted(self._tensors)}; "
                "make the context with this model's new_context()"
            )
        for name, tensor in self._tensors.items():
            tensor.append(streams[name])
        return {name: tensor.read() for name, tensor in self._tensors.items()}

    def truncate(self, n_tokens: int) -> None:
        """Forget every token from `n_tokens` on, in every stream."""
        for tensor in self._tensors.values():
            tensor.truncate(n_tokens)


class LayerKVCache(LayerCache):
    """Keys (after RoPE) and values of standard, grouped-query and bottleneck attention."""

    names = ("k", "v")


class DecoupledLayerKVCache(LayerCache):
    """Semantic keys, geometric keys (after RoPE) and values of decoupled attention, per key/value head."""

    names = ("k_sem", "k_geo", "v")


class LatentLayerKVCache(LayerCache):
    """The latent that all heads read as semantic key and value, and the geometric key (after RoPE)."""

    names = ("c", "k_geo")


def new_layer_cache(
    dims: AttentionDims,
    batch_size: int,
    max_tokens: int,
    kind: KVCacheKind = KVCacheKind.FP32,
    device: torch.device | str = "cpu",
    static: bool = False,
) -> LayerCache:
    """Return an empty cache for the streams that an attention layer of these widths stores.

    Raises:
        ConfigError: no cache class holds these streams, or the kind is not built yet.
    """
    names = tuple(name for name, _, _ in dims.streams)
    for cls in (LayerKVCache, DecoupledLayerKVCache, LatentLayerKVCache):
        if cls.names == names:
            return cls(
                dims.streams,
                batch_size=batch_size,
                max_tokens=max_tokens,
                kind=kind,
                device=device,
                static=static,
            )
    raise ConfigError(
        f"KV cache: no cache holds the streams {names}; use the dims of an attention layer's config"
    )
