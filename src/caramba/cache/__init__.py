"""Key/value caches: one storage per cached stream, one cache per attention application, one context per
batch."""

from caramba.cache.context import Context
from caramba.cache.layer import (
    DecoupledLayerKVCache,
    LatentLayerKVCache,
    LayerCache,
    LayerKVCache,
    new_layer_cache,
)
from caramba.cache.tensor import KVCacheTensor, KVCacheTensorConfig
from caramba.config.kvcache import KVCacheKind

__all__ = [
    "Context",
    "DecoupledLayerKVCache",
    "KVCacheKind",
    "KVCacheTensor",
    "KVCacheTensorConfig",
    "LatentLayerKVCache",
    "LayerCache",
    "LayerKVCache",
    "new_layer_cache",
]
