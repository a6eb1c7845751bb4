"""Key/value caches: one storage per cached stream, one cache per attention application, one context per
batch."""

from caramba.cache.context import Context
from caramba.cache.first_tokens import FirstTokensKVCache
from caramba.cache.layer import (
    DecoupledLayerKVCache,
    LatentLayerKVCache,
    LayerCache,
    LayerKVCache,
    new_layer_cache,
)
from caramba.cache.own import OwnLayerCache
from caramba.cache.rows import RowsContext
from caramba.cache.slots import SlotContext
from caramba.cache.step import StepContext, refusal
from caramba.cache.tensor import TAIL_TOKENS, KVCacheTensor, KVCacheTensorConfig
from caramba.config.kvcache import KVCacheKind

__all__ = [
    "TAIL_TOKENS",
    "Context",
    "DecoupledLayerKVCache",
    "FirstTokensKVCache",
    "KVCacheKind",
    "KVCacheTensor",
    "KVCacheTensorConfig",
    "LatentLayerKVCache",
    "LayerCache",
    "LayerKVCache",
    "OwnLayerCache",
    "RowsContext",
    "SlotContext",
    "StepContext",
    "new_layer_cache",
    "refusal",
]
