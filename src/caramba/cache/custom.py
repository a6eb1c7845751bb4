"""The cache of a user's custom layer: the streams it declares, read and written from the host."""

from __future__ import annotations

from typing import Any, Self

from caramba.cache.layer import LayerCache
from caramba.config.kvcache import KVCacheKind, Streams


class CustomLayerCache(LayerCache):
    """The streams that a layer's schema declares by `cached_streams`, [B, heads, S, width] each.

    The layer's forward calls `ctx.next_cache()` once, passes the new tokens of every stream to `append`, and receives
    all stored tokens, the new ones last. The cache itself handles rollback, row selection, quantised formats and
    saving.
    """

    is_for_host = True

    def __init__(self, streams: Streams, **options: Any) -> None:
        # An instance attribute: other caches declare `names` on the class.
        self.__dict__["names"] = tuple(name for name, _, _ in streams)
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
