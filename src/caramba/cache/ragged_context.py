"""Cache state of a ragged batch: rows of different lengths that advance by different numbers of tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from caramba.cache.context import Context
from caramba.cache.device_context import DeviceContext, refusal
from caramba.errors import CacheFull, ConfigError


class RaggedContext(DeviceContext):
    """Replaces a `Context` in forwards in which every row has its own position.

    A forward over T tokens per row writes row b's tokens after its `device_lengths[b]` stored ones, attends to those
    only, and adds T to every row; `rewind` then sets how many each row keeps. Memory past a row's length is never
    read, so padding tokens can have any value.

        rows = RaggedContext(ctx, lengths)   # ctx has seen the rows' prompts, padded on the right
        rows.width = T
        model(tokens, rows)                # [B, T]
        rows.rewind(kept)

    It writes into the buffers of `ctx` and does not change its counts: truncate `ctx` before using it again. T is at
    most `MAX_QUERIES` of the decode attention.

    Attributes:
        device_lengths: tokens of each row before this forward, int32 [B].
        lengths: the same numbers on the host.
        last: largest position assigned to a token; padding tokens beyond it are clamped to it.

    Raises:
        ConfigError: a context that `refusal` names a reason for, or another number of rows.
    """

    def __init__(self, ctx: Context, lengths: Sequence[int], last: int | None = None) -> None:
        super().__init__(ctx)
        self.last = self.limit - 1 if last is None else last
        self._is_counted = False
        self.rewind(lengths)

    @classmethod
    def refusal(cls, ctx: Context) -> str | None:
        """Return why rows cannot have separate positions, None if they can."""
        return refusal(ctx)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set each row's length; later tokens are discarded.

        Raises:
            ConfigError: another number of rows, or a length beyond what is allocated.
        """
        if len(lengths) != self.device_lengths.shape[0] or any(not 0 <= n <= self.limit for n in lengths):
            raise ConfigError(
                f"context: rows of lengths {list(lengths)[:8]}, expected {self.device_lengths.shape[0]} "
                f"from 0 to {self.limit}"
            )
        self.lengths = list(lengths)
        self.device_lengths.copy_(torch.tensor(self.lengths, dtype=torch.int32))

    def reload_lengths(self, lengths: Sequence[int]) -> None:
        """Set the host's lengths after the device has changed `device_lengths` itself."""
        self.lengths = list(lengths)

    def begin(self) -> None:
        """Start a forward over `width` tokens per row.

        Raises:
            CacheFull: a row has no place for them; nothing is changed.
        """
        if not self._is_counted:
            self._refuse_full()
        self._cursor, self.angles = 0, {}
        self.seqlens = self.device_lengths + self.width
        self.offset = self._positions()

    def commit(self, n_tokens: int) -> None:
        """End a forward and add its tokens to every row.

        Raises:
            ConfigError: another number of tokens than `width`, or an attention application took no cache.
        """
        if n_tokens != self.width or self._cursor != len(self.ctx.caches):
            raise ConfigError(
                f"context: {n_tokens} tokens in {self._cursor} of {len(self.ctx.caches)} caches, expected "
                f"{self.width} in all; set width to the tokens per row, with a context of this model"
            )
        self.angles = {}
        self.device_lengths.add_(self.width)
        if not self._is_counted:
            self.lengths = [n + self.width for n in self.lengths]

    @contextlib.contextmanager
    def host_counted_forward(self) -> Iterator[None]:
        """Run a block with one forward over `width` tokens per row, counted on the host after the block.

        Inside it a forward depends on tensors only, so it can be compiled, captured or repeated at the same positions.

        Raises:
            CacheFull: a row has no place for them; nothing is changed.
        """
        self._refuse_full()
        self._is_counted = True
        try:
            yield
            self.lengths = [n + self.width for n in self.lengths]
        finally:
            self._is_counted = False

    def _refuse_full(self) -> None:
        end = max(self.lengths) + self.width
        if end > self.limit:
            raise CacheFull(
                f"KV cache: {end} tokens do not fit max_tokens={self.limit}; "
                "make the context with a larger max_tokens, or rewind it"
            )

    def _positions(self) -> Tensor:
        steps = torch.arange(self.width, dtype=torch.int32, device=self.device_lengths.device)
        return (self.device_lengths[:, None] + steps).clamp(max=self.last)
