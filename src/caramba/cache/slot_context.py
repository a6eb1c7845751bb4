"""Slot cache for continuous batching: each slot has its own length or is idle, in one forward of one token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from caramba.cache.context import Context
from caramba.cache.device_context import DeviceContext
from caramba.cache.layer import LayerCache
from caramba.ops.dba_decode import StoredStream

IDLE = -1


class SlotContext(DeviceContext):
    """A `DeviceContext` with a length for each slot, set by `set_lengths`; a slot of length `IDLE` is unused.

    An idle slot takes part in the forward, because shapes are fixed, but reads and writes nothing and stays idle; its
    output is meaningless. The caller keeps the host's lengths; those of `ctx` are not updated. Fill a slot through
    `ctx.row(index)`, which shares memory.

    With a quantised cache, before a step whose token does not fit a slot's tail, call `pack` on its row and pass the
    new count to `set_lengths`.

    Attributes:
        device_lengths: tokens that each slot stores before this step, int32 [B], or IDLE.
        visible: upper bound of the tokens that a forward reads, if the host knows one; None reads all that is
            allocated. It changes shapes, so it stays None if a forward is captured or compiled.

    Raises:
        ConfigError: a context that `refusal` names a reason for.
    """

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self.visible: int | None = None
        self.device_lengths.fill_(IDLE)
        if self.packed is not None:
            self.packed.fill_(0)

    def set_lengths(self, lengths: Sequence[int], packed: Sequence[int] | None = None) -> None:
        """Set every slot's length, or IDLE, and for a quantised cache the tokens that each stores as blocks."""
        self._put(self.device_lengths, lengths)
        if self.packed is not None and packed is not None:
            self._put(self.packed, packed)

    @staticmethod
    def _put(into: torch.Tensor, numbers: Sequence[int]) -> None:
        # A copy from unpinned memory would synchronise with the device.
        given = torch.tensor(numbers, dtype=torch.int32, pin_memory=into.is_cuda)
        into.copy_(given, non_blocking=into.is_cuda)

    def begin(self) -> None:
        """Start a forward."""
        super().begin()  # places of an idle row are below 0 too
        self.offset = self.device_lengths.clamp(min=0)[:, None]

    def storage(self, cache: LayerCache) -> Mapping[str, StoredStream]:
        """Return the streams of a cache as allocated, cut to the tokens that any slot reads."""
        streams, end = cache.storage(), self.visible
        if end is None:
            return streams
        return {
            name: StoredStream(kind, values[:, :, :end], None if scales is None else scales[:, :, :end], tail)
            for name, (kind, values, scales, tail) in streams.items()
        }

    def _count(self) -> None:
        self.device_lengths.add_((self.device_lengths >= 0).to(torch.int32))
