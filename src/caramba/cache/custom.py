"""The cache of a layer of somebody's own: whatever streams it names, read and written from the host."""

from __future__ import annotations

from typing import Any, Self

from caramba.cache.layer import LayerCache
from caramba.config.kvcache import KVCacheKind, Streams


class CustomLayerCache(LayerCache):
    """The streams that a layer's schema declares by `cached_streams`, [B, heads, S, width] each.

    The layer's forward takes it by `ctx.next_cache()`, once, gives the new tokens of every stream to `append`, and
    gets all tokens back, the new ones last. Everything else (rolling back, choosing rows, quantised formats, saving)
    is done without it.
    """

    is_for_host = True

    def __init__(self, streams: Streams, **options: Any) -> None:
        self.__dict__["names"] = tuple(
            name for name, _, _ in streams
        )  # of this cache, where others are of a class
        super().__init__(streams, **options)

    @classmethod
    def of(
        cls,
        streams: Streams,
        batch_size: int,
        max_tokens: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: Any = "cpu",
        static: bool = False,
        **format: Any,
    ) -> Self:
        """Return an empty cache; the arguments are those of `new_layer_cache`."""
        return cls(
            streams,
            batch_size=batch_size,
            max_tokens=max_tokens,
            kind=kind,
            device=device,
            static=static,
            **format,
        )
