"""Quantisation-aware attention: keys and values rounded to the format that a cache stores them in."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from caramba.config.kvcache import BLOCKS, KVCacheKind, Streams, kind_of_stream
from caramba.ops.formats import round_to_blocks


class CacheRounding(nn.Module):
    """Round every stream of an attention layer to a quantised cache format, with a straight-through gradient.

    Training and one forward over a whole text then read what a cache of this format stores, and the weights adapt to
    it. Blocks run over the features of all heads, as in the cache. The backward pass treats the rounding as the
    identity. Exact first tokens are not rounded, and neither are the most recent tokens of a cache in decoding.

    Shape: each stream [B, K, T, D] to the same, dtype unchanged.

    Reference: Bengio et al., 2013, arXiv:1308.3432 (straight-through estimator).
    """

    def __init__(self, kind: KVCacheKind, streams: Streams) -> None:
        super().__init__()
        kinds = {name: kind_of_stream(kind, name) for name, _, _ in streams}
        self.formats = {name: (str(kind), BLOCKS[kind].elements) for name, kind in kinds.items()}

    def forward(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: self._rounded(x, *self.formats[name]) if name in self.formats else x
            for name, x in streams.items()
        }

    @staticmethod
    def _rounded(x: Tensor, kind: str, elements: int) -> Tensor:
        rows = x.detach().transpose(1, 2).flatten(2)
        rounded = (
            round_to_blocks(rows, kind, elements).unflatten(-1, (x.shape[1], x.shape[3])).transpose(1, 2)
        )
        # The difference is exactly zero: it adds the gradient of the identity and no rounding of its own.
        return rounded + (x - x.detach())
