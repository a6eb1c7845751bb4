"""Growing buffer for the tokens of one cached stream."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

GROWTH = 2
FIRST_CAPACITY = 16


class TokenBuffer:
    """A buffer [B, N, capacity, W] that grows along its token axis; the caller counts the tokens in use.

    `static` allocates `limit` tokens at once. Otherwise nothing is allocated before the first write, and a full
    buffer is replaced by one of at least twice its capacity, never above `limit`.
    """

    def __init__(
        self,
        batch_size: int,
        n_lanes: int,
        width: int,
        *,
        dtype: torch.dtype,
        limit: int,
        device: torch.device | str,
        static: bool,
    ) -> None:
        self.limit = limit
        self.data = _empty((batch_size, n_lanes, limit if static else 0, width), dtype, torch.device(device))

    @property
    def capacity(self) -> int:
        """Tokens per sequence that the allocation holds."""
        return self.data.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation, the whole batch together."""
        return self.data.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of one sequence takes."""
        _, n_lanes, _, width = self.data.shape
        return n_lanes * width * self.data.element_size()

    def used_bytes(self, n_tokens: int) -> int:
        """Bytes that `n_tokens` of every sequence take."""
        return self.data.shape[0] * n_tokens * self.token_bytes

    def view(self, n_tokens: int) -> Tensor:
        """Return the first tokens, [B, N, n_tokens, W], without a copy."""
        return self.data.narrow(2, 0, n_tokens)

    def write(self, start: int, values: Tensor) -> None:
        """Write values [B, N, T, W] at tokens `start` to `start` + T, cast to this buffer's dtype.

        The buffer grows if needed; tokens before `start` are kept.
        """
        n_tokens = values.shape[2]
        end = start + n_tokens
        if end > self.data.shape[2]:
            old, capacity = self.data, min(self.limit, max(end, GROWTH * self.capacity, FIRST_CAPACITY))
            self.data = _empty((*old.shape[:2], capacity, old.shape[3]), old.dtype, old.device)
            self.data[:, :, :start].copy_(old[:, :, :start])
        self.data.narrow(2, start, n_tokens).copy_(values)

    def row(self, index: int, n_rows: int = 1) -> TokenBuffer:
        """Return a view of sequences `index` to `index` + `n_rows` that shares this buffer's memory."""
        alone = copy.copy(self)
        alone.data = self.data[index : index + n_rows]
        return alone

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows` [B'] integers, in that order; one may come more than once."""
        # A tensor made inside inference_mode could not be written to outside of it later.
        with torch.inference_mode(False), torch.no_grad():
            self.data = self.data.index_select(0, rows.to(self.data.device).clone())


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # as above
        return torch.empty(shape, dtype=dtype, device=device)
