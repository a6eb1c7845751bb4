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
        self.streams = streams
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
            for name, n_heads, width in self._stored()
        }

    def _stored(self) -> Streams:
        """Return the tensors to allocate."""
        return self.streams

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

    def read(self) -> dict[str, Tensor]:
        """Return all tokens stored, [B, K, S, D] per stream, as views in the storage dtype."""
        return {name: tensor.read() for name, tensor in self._tensors.items()}

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store the next tokens of every stream and return all tokens stored, the new ones included.

        Shape: in [B, K, T, D] per stream, out [B, K, S, D] with S = tokens before + T, in the storage dtype.
        """
        if set(streams) != set(self.names):
            raise ConfigError(
                f"{type(self).__name__}: got streams {sorted(streams)}, expected {sorted(self.names)}; "
                "make the context with this model's new_context()"
            )
        self._store(streams)
        return self.read()

    def _store(self, streams: Mapping[str, Tensor]) -> None:
        for name, tensor in self._tensors.items():
            tensor.append(streams[name])

    def reorder(self, rows: Tensor) -> None:
        """Give sequence b of the batch the tokens of sequence rows[b]."""
        for tensor in self._tensors.values():
            chosen = tensor.read().index_select(0, rows.to(tensor.read().device))
            tensor.truncate(0)
            tensor.append(chosen)

    def truncate(self, n_tokens: int) -> None:
        """Forget every token from `n_tokens` on, in every stream."""
        for tensor in self._tensors.values():
            tensor.truncate(n_tokens)

    def extend(self, max_tokens: int) -> None:
        """Allow up to `max_tokens` tokens in every stream, if that is more than before."""
        for tensor in self._tensors.values():
            tensor.extend(max_tokens)


class LayerKVCache(LayerCache):
    """Keys (after RoPE) and values of standard, grouped-query and bottleneck attention."""

    names = ("k", "v")


class DecoupledLayerKVCache(LayerCache):
    """Semantic keys, geometric keys (after RoPE) and values of decoupled attention, per key/value head."""

    names = ("k_sem", "k_geo", "v")


class LatentLayerKVCache(LayerCache):
    """The latent that all heads read as semantic key and value, and the geometric key (after RoPE).

    Both lie side by side in one tensor, because absorbed attention reads them as one key: `read` returns that as
    `joined` [B, 1, S, R + Dgeo], without a copy.
    """

    names = ("c", "k_geo")

    def _stored(self) -> Streams:
        return (("joined", 1, sum(width for _, _, width in self.streams)),)

    def _store(self, streams: Mapping[str, Tensor]) -> None:
        self._tensors["joined"].append(torch.cat([streams[name] for name in self.names], dim=-1))

    def read(self) -> dict[str, Tensor]:
        joined = self._tensors["joined"].read()
        c, k_geo = joined.split([width for _, _, width in self.streams], dim=-1)
        return {"c": c, "k_geo": k_geo, "joined": joined}


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
