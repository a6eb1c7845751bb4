"""Caches of one attention application: a fixed set of streams that grow together."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor

from caramba.cache.tensor import TAIL_TOKENS, KVCacheTensor, KVCacheTensorConfig
from caramba.config.kvcache import KVCacheKind, Streams, kind_of_stream
from caramba.config.layer import AttentionDims
from caramba.errors import ConfigError

FOUR_BIT = (KVCacheKind.Q4_0, KVCacheKind.NF4)
ROTATED = ("k", "k_sem", "k_geo", "c")


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
        tail_tokens: int = TAIL_TOKENS,
        hadamard: bool = False,
    ) -> None:
        got = tuple(name for name, _, _ in streams)
        if got != self.names:
            raise ConfigError(
                f"{type(self).__name__}: got streams {got}, expected {self.names}; use new_layer_cache()"
            )
        self._tensors = {
            name: KVCacheTensor(
                _format(kind, name, tail_tokens, hadamard),
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
    def tail_bytes(self) -> int:
        """Bytes, of those used, of the tokens that quantised streams still have in 16 bits."""
        return sum(tensor.tail_bytes for tensor in self._tensors.values())

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes for good, all streams together."""
        return sum(tensor.bytes_per_token for tensor in self._tensors.values())

    def stream(self, name: str) -> KVCacheTensor:
        """Return the storage of one stream."""
        return self._tensors[name]

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store the next tokens of every stream and return all tokens stored, the new ones included.

        Shape: in [B, K, T, D] per stream, out [B, K, S, D] with S = tokens before + T, in the storage dtype, of
        quantised streams in the dtype that came in.
        """
        if set(streams) != set(self._tensors):
            raise ConfigError(
                f"{type(self).__name__}: got streams {sorted(streams)}, expected {sorted(self._tensors)}; "
                "make the context with this model's new_context()"
            )
        for name, tensor in self._tensors.items():
            tensor.append(streams[name])
        return {
            name: tensor.read(None if tensor.config.is_exact else streams[name].dtype)
            for name, tensor in self._tensors.items()
        }

    def truncate(self, n_tokens: int) -> None:
        """Forget every token from `n_tokens` on, in every stream."""
        for tensor in self._tensors.values():
            tensor.truncate(n_tokens)

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, [B'] int64, in that order, in every stream."""
        for tensor in self._tensors.values():
            tensor.select(rows)

    def clone(self) -> Self:
        """Return a copy that shares no memory."""
        copied = copy.copy(self)
        copied._tensors = {name: tensor.clone() for name, tensor in self._tensors.items()}
        return copied

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what is stored, by `stream.buffer`."""
        return {
            f"{name}.{part}": values
            for name, tensor in self._tensors.items()
            for part, values in tensor.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take the content of another cache of the same streams, format and batch.

        Raises:
            ConfigError: what is there is not that of these streams.
        """
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in self._tensors}
        for key, values in state.items():
            name, _, part = key.partition(".")
            if name not in parts:
                raise ConfigError(
                    f"{type(self).__name__}: the state has a stream {name!r}, expected {sorted(parts)}; "
                    "load it into a cache of the model that it was saved from"
                )
            parts[name][part] = values
        for name, tensor in self._tensors.items():
            tensor.load_state_dict(parts[name])


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
    *,
    tail_tokens: int = TAIL_TOKENS,
    hadamard: bool = False,
) -> LayerCache:
    """Return an empty cache for the streams that an attention layer of these widths stores.

    `hadamard` rotates what 4-bit streams of keys and latents store; values and other formats stay as they are.

    Raises:
        ConfigError: no cache class holds these streams, or the kind is `auto`, which nobody has chosen yet.
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
                tail_tokens=tail_tokens,
                hadamard=hadamard,
            )
    raise ConfigError(
        f"KV cache: no cache holds the streams {names}; use the dims of an attention layer's config"
    )


def _format(kind: KVCacheKind, stream: str, tail_tokens: int, hadamard: bool) -> KVCacheTensorConfig:
    own = kind_of_stream(kind, stream)
    return KVCacheTensorConfig(own, tail_tokens, hadamard and own in FOUR_BIT and stream in ROTATED)
