"""A batch whose rows are slots: each at its own length, or idle, in one forward of one token for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from caramba.cache.context import Context
from caramba.cache.layer import LayerCache, LayerKVCache
from caramba.cache.step import StepContext, refusal
from caramba.ops import StoredStream

IDLE = -1


class SlotContext(StepContext):
    """A `StepContext` with a length for each row, set by `hold`; a row whose length is `IDLE` stands still.

    An idle row takes part in the forward, because shapes are fixed, but writes nothing, reads nothing and stays idle:
    what it returns has no meaning. The host keeps the lengths itself; those of `ctx` stay as they are, and are no
    longer true. Rows are filled through `ctx.row(index)`, which writes into the same memory.

    A quantised cache may be stepped too: before a step whose token a row's tail has no place for, `pack` its row and
    say so by `hold`.

    Attributes:
        held: tokens that each row stores before this step, int32 [B], or IDLE.
        visible: tokens that a forward may read at most, where the host knows; None reads as far as is allocated. It
            changes shapes, so it is left None where a forward is captured or compiled.

    Raises:
        ConfigError: a context that `refusal` names a reason for.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.visible: int | None = None
        self.held.fill_(IDLE)
        if any(cache.n_packed is not None for cache in ctx.caches):
            with torch.inference_mode(False):
                self.packed = torch.zeros_like(self.held)

    @classmethod
    def refusal(cls, ctx: Context) -> str | None:
        """Return why steps on a context cannot run by themselves on the device, None where they can."""
        for cache in ctx.caches:
            if cache.is_rotated:
                return "the cache is Hadamard-rotated"
            if cache.n_packed is not None and cache.names == LayerKVCache.names:
                return "the cache is quantised, and keys of one part cannot be read as two from blocks"
        return refusal(ctx, is_packed=True)

    def hold(self, lengths: Sequence[int], packed: Sequence[int] | None = None) -> None:
        """Set every row's length, or IDLE, and of a quantised cache the tokens that each holds as blocks."""
        self.held.copy_(torch.tensor(lengths, dtype=torch.int32), non_blocking=True)
        if self.packed is not None and packed is not None:
            self.packed.copy_(torch.tensor(packed, dtype=torch.int32), non_blocking=True)

    def begin(self) -> None:
        """Start a forward."""
        super().begin()
        self.offset = self.held.clamp(min=0)[:, None]
        # Of an idle row this is below 0 too.
        self.places = self.held if self.packed is None else self.held - self.packed

    def stored(self, cache: LayerCache) -> Mapping[str, StoredStream]:
        """Return the streams of a cache as they lie in memory, as far as any row reads."""
        streams, end = cache.stored(), self.visible
        if end is None:
            return streams
        return {
            name: StoredStream(kind, values[:, :, :end], None if scales is None else scales[:, :, :end], tail)
            for name, (kind, values, scales, tail) in streams.items()
        }

    def _count(self) -> None:
        self.held.add_((self.held >= 0).to(torch.int32))
