"""Key/value caches: one storage per cached stream, one cache per attention application, one context per
batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.cache.context import Context
    from caramba.cache.device_context import DeviceContext, refusal
    from caramba.cache.layer import (
        CustomLayerCache,
        DecoupledLayerKVCache,
        FirstTokensKVCache,
        LatentLayerKVCache,
        LayerCache,
        LayerKVCache,
        new_layer_cache,
    )
    from caramba.cache.memory_bank import MemoryLayerKVCache
    from caramba.cache.tensor import TAIL_TOKENS, KVCacheTensor, KVCacheTensorConfig
    from caramba.cache.window import WindowLayerKVCache
    from caramba.config.kvcache import KVCacheKind

__all__ = [
    "TAIL_TOKENS",
    "Context",
    "CustomLayerCache",
    "DecoupledLayerKVCache",
    "DeviceContext",
    "FirstTokensKVCache",
    "KVCacheKind",
    "KVCacheTensor",
    "KVCacheTensorConfig",
    "LatentLayerKVCache",
    "LayerCache",
    "LayerKVCache",
    "MemoryLayerKVCache",
    "WindowLayerKVCache",
    "new_layer_cache",
    "refusal",
]

__getattr__ = lazy_exports(__name__, __file__)
