"""Key/value caches: one storage per cached stream, one cache per attention application, one context per
batch."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.cache.context import Context as Context
    from caramba.cache.device_context import DeviceContext as DeviceContext
    from caramba.cache.device_context import refusal as refusal
    from caramba.cache.layer import CustomLayerCache as CustomLayerCache
    from caramba.cache.layer import DecoupledLayerKVCache as DecoupledLayerKVCache
    from caramba.cache.layer import FirstTokensKVCache as FirstTokensKVCache
    from caramba.cache.layer import LatentLayerKVCache as LatentLayerKVCache
    from caramba.cache.layer import LayerCache as LayerCache
    from caramba.cache.layer import LayerKVCache as LayerKVCache
    from caramba.cache.layer import new_layer_cache as new_layer_cache
    from caramba.cache.memory_bank import MemoryLayerKVCache as MemoryLayerKVCache
    from caramba.cache.tensor import TAIL_TOKENS as TAIL_TOKENS
    from caramba.cache.tensor import KVCacheTensor as KVCacheTensor
    from caramba.cache.tensor import KVCacheTensorConfig as KVCacheTensorConfig
    from caramba.cache.window import WindowLayerKVCache as WindowLayerKVCache
    from caramba.config.kvcache import KVCacheKind as KVCacheKind

__getattr__ = lazy_exports(__name__, __file__)
