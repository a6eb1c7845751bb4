"""The state of a batch whose rows hold different numbers of tokens and advance by different numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from caramba.cache.context import Context
from caramba.cache.device_context import DeviceContext, refusal
from caramba.errors import CacheFull, ConfigError


class RaggedContext(DeviceContext):
    """Takes a context's place in forwards in which every row stands at its own position.

    A forward over T tokens per row writes row b's behind its own `held[b]` tokens, attends to those and to no others,
    and adds T to every row; `rewind` then says how many of them each row keeps. What lies behind a row's length is
    never read, so the tokens that fill up a row may be any.

        rows = RaggedContext(ctx, lengths)   # ctx has seen the rows' prompts, padded on the right
        rows.width = T
        model(tokens, rows)                # [B, T]
        rows.rewind(kept)

    It writes into the buffers of `ctx`, whose own counts it leaves alone: who goes on with the context rather than
    with its rows truncates it first. T is at most `MAX_QUERIES` of the decode attention.

    Attributes:
        held: tokens of each row before this forward, int32 [B].
        last: greatest position that a token is given; tokens that only fill up a row may lie behind it.

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
        """Return why rows cannot stand at positions of their own, None where they can."""
        return refusal(ctx)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Say how many tokens each row holds; what it has stored behind them is forgotten.

        Raises:
            ConfigError: another number of rows, or a length beyond what is allocated.
        """
        if len(lengths) != self.held.shape[0] or any(not 0 <= n <= self.limit for n in lengths):
            raise ConfigError(
                f"context: rows of lengths {list(lengths)[:8]}, expected {self.held.shape[0]} from 0 to {self.limit}"
            )
        self.lengths = list(lengths)
        self.held.copy_(torch.tensor(self.lengths, dtype=torch.int32))

    def reload_lengths(self, lengths: Sequence[int]) -> None:
        """Take over how many tokens each row holds where the device has said so to `held` itself."""
        self.lengths = list(lengths)

    def begin(self) -> None:
        """Start a forward over `width` tokens per row.

        Raises:
            CacheFull: a row has no place for them; nothing is changed.
        """
        if not self._is_counted:
            self._refuse_full()
        self._cursor, self.angles = 0, {}
        self.seqlens = self.held + self.width
        self.offset = self._positions()

    def commit(self, n_tokens: int) -> None:
        """End a forward: every row holds its tokens.

        Raises:
            ConfigError: another number of tokens than `width`, or an attention application took no cache.
        """
        if n_tokens != self.width or self._cursor != len(self.ctx.caches):
            raise ConfigError(
                f"context: {n_tokens} tokens in {self._cursor} of {len(self.ctx.caches)} caches, expected "
                f"{self.width} in all; set width to the tokens per row, with a context of this model"
            )
        self.angles = {}
        self.held.add_(self.width)
        if not self._is_counted:
            self.lengths = [n + self.width for n in self.lengths]

    @contextlib.contextmanager
    def host_counted_forward(self) -> Iterator[None]:
        """Run a block with one forward over `width` tokens per row, counted here: inside it a forward is a function of
        tensors alone, which can be compiled, captured, or run several times at the same places.

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
        steps = torch.arange(self.width, dtype=torch.int32, device=self.held.device)
        return (self.held[:, None] + steps).clamp(max=self.last)
