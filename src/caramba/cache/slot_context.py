"""A batch whose rows are slots: each at its own length, or idle, in one forward of one token for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from caramba.cache.context import Context
from caramba.cache.device_context import DeviceContext
from caramba.cache.layer import LayerCache
from caramba.ops import StoredStream

IDLE = -1


class SlotContext(DeviceContext):
    """A `DeviceContext` with a length for each row, set by `set_lengths`; a row whose length is `IDLE` stands still.

    An idle row takes part in the forward, because shapes are fixed, but writes nothing, reads nothing and stays idle:
    what it returns has no meaning. The host keeps the lengths itself; those of `ctx` stay as they are, and are no
    longer true. Rows are filled through `ctx.row(index)`, which writes into the same memory.

    A quantised cache may be stepped too: before a step whose token a row's tail has no place for, `pack` its row and
    say so by `set_lengths`.

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
        if self.packed is not None:
            self.packed.fill_(0)

    def set_lengths(self, lengths: Sequence[int], packed: Sequence[int] | None = None) -> None:
        """Set every row's length, or IDLE, and of a quantised cache the tokens that each holds as blocks."""
        self._put(self.held, lengths)
        if self.packed is not None and packed is not None:
            self._put(self.packed, packed)

    @staticmethod
    def _put(into: torch.Tensor, numbers: Sequence[int]) -> None:
        # A copy from memory that is not pinned would first wait for all that the device has been given.
        given = torch.tensor(numbers, dtype=torch.int32, pin_memory=into.is_cuda)
        into.copy_(given, non_blocking=into.is_cuda)

    def begin(self) -> None:
        """Start a forward."""
        super().begin()  # places of an idle row are below 0 too
        self.offset = self.held.clamp(min=0)[:, None]

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
