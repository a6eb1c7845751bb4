"""The cache of a latent layer that also stores a sequence's first tokens at full precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from caramba.cache.layer import LatentLayerKVCache
from caramba.cache.tensor import KVCacheTensor, KVCacheTensorConfig
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.config.layer import AttentionDims
from caramba.errors import ConfigError


class FirstTokensKVCache(LatentLayerKVCache):
    """Latent cache that also stores `k_first` (after RoPE) and `v_first` of the first n tokens.

    Both are stored in the cache's dtype, in bfloat16 if that is quantised. Their size is constant per sequence:
    `bytes_per_token` excludes them, `first_bytes` reports them, `used_bytes` and `allocated_bytes` include them.
    """

    keeps_first_tokens = True

    def __init__(
        self,
        dims: AttentionDims,
        *,
        batch_size: int,
        max_tokens: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: torch.device | str = "cpu",
        static: bool = False,
        **format: Any,
    ) -> None:
        super().__init__(
            dims.streams,
            batch_size=batch_size,
            max_tokens=max_tokens,
            kind=kind,
            device=device,
            static=static,
            **format,
        )
        self.first_tokens = dims.first_tokens
        exact = kind if kind in EXACT_KINDS else KVCacheKind.BF16
        self._first = {
            name: KVCacheTensor(
                KVCacheTensorConfig(exact),
                batch_size=batch_size,
                n_heads=n_heads,
                width=width,
                max_tokens=min(dims.first_tokens, max_tokens),
                device=device,
                static=static,
            )
            for name, n_heads, width in dims.first_streams
        }

    @property
    def first_bytes(self) -> int:
        """Bytes, of those used, of the first tokens' keys and values at full precision."""
        return sum(tensor.used_bytes for tensor in self._first.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the stored tokens, what is kept of the first ones included."""
        return super().used_bytes + self.first_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocated buffers."""
        return super().allocated_bytes + sum(tensor.allocated_bytes for tensor in self._first.values())

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `LayerCache.append`; `k_first` and `v_first` hold the new tokens among the first n, or none."""
        missing = sorted(set(self._first) - set(streams))
        if missing:
            raise ConfigError(
                f"{type(self).__name__}: got streams {sorted(streams)}, without {', '.join(missing)}; "
                "make the context with this model's new_context()"
            )
        others = {name: values for name, values in streams.items() if name not in self._first}
        before = self.n_tokens
        expected = self._kept(before + streams[self.names[0]].shape[2]) - self._kept(before)
        for name in self._first:
            if streams[name].shape[2] != expected:
                raise ConfigError(
                    f"{type(self).__name__}: got {streams[name].shape[2]} tokens of {name} after {before} tokens, "
                    f"expected {expected} (the first {self.first_tokens} of a sequence are kept)"
                )
        for name, tensor in self._first.items():  # before anything is stored
            tensor.check_append(streams[name])
        stored = super().append(others)
        for name, tensor in self._first.items():
            tensor.put(streams[name])
        return stored | {name: tensor.read() for name, tensor in self._first.items()}

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return super().read(dtype) | {name: tensor.read() for name, tensor in self._first.items()}

    def truncate(self, n_tokens: int) -> None:
        super().truncate(n_tokens)
        for tensor in self._first.values():
            tensor.truncate(min(n_tokens, tensor.n_tokens))

    def extend(self, max_tokens: int) -> None:
        super().extend(max_tokens)
        for tensor in self._first.values():
            tensor.extend(self._kept(max_tokens))

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        for tensor in self._first.values():
            tensor.select(rows)

    def row(self, index: int, n_rows: int = 1) -> Self:
        alone = super().row(index, n_rows)
        alone._first = {name: tensor.row(index, n_rows) for name, tensor in self._first.items()}
        return alone

    @property
    def memory(self) -> list[Tensor]:
        return [*super().memory, *(part for tensor in self._first.values() for part in tensor.memory)]

    def clone(self) -> Self:
        copied = super().clone()
        copied._first = {name: tensor.clone() for name, tensor in self._first.items()}
        return copied

    def state_dict(self) -> dict[str, Tensor]:
        first = {
            f"{name}.{part}": values
            for name, tensor in self._first.items()
            for part, values in tensor.state_dict().items()
        }
        return super().state_dict() | first

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        parts: dict[str, dict[str, Tensor]] = {name: {} for name in self._first}
        others: dict[str, Tensor] = {}
        for key, values in state.items():
            name, _, part = key.partition(".")
            if name in parts:
                parts[name][part] = values
            else:
                others[key] = values
        held = {name: tensor.check_state(parts[name])[0] for name, tensor in self._first.items()}
        n_tokens = self.tokens_of(others)
        for name, count in held.items():
            if count != self._kept(n_tokens):
                raise ConfigError(
                    f"{type(self).__name__}: the state has {count} tokens of {name} and {n_tokens} of the others, "
                    f"expected {self._kept(n_tokens)}; load it into a cache of the model that it was saved from"
                )
        super().load_state_dict(others)
        for name, tensor in self._first.items():
            tensor.load_state_dict(parts[name])

    def _kept(self, n_tokens: int) -> int:
        """Return how many of `n_tokens` are among the first."""
        return min(n_tokens, self.first_tokens)
