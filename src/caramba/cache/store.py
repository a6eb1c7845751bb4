"""Storage of one cached stream in growing buffers: exact numbers of a dtype, or quantised blocks and a 16-bit tail."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.formats import dequantize, get_block_format, hadamard, quantize

TAIL_DTYPE = torch.bfloat16  # holds any bfloat16 model's keys and values as they are, and never overflows
PACK_TOKENS = 1024  # quantised at once: bounds the float32 copy of a long prompt
ALIGNED_TOKENS = 16  # blocks are allocated for multiples of it: so rows of scales begin at multiples of 16 bytes
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


class ExactStore:
    """Tokens as numbers of one type."""

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        batch_size: int,
        n_heads: int,
        width: int,
        max_tokens: int,
        device: torch.device | str,
        static: bool,
    ) -> None:
        self.values = TokenBuffer(
            batch_size, n_heads, width, dtype=dtype, limit=max_tokens, device=device, static=static
        )

    @property
    def buffers(self) -> dict[str, TokenBuffer]:
        return {"values": self.values}

    def append(self, values: Tensor, n_tokens: int) -> None:
        self.values.write(n_tokens, values)

    def read(self, n_tokens: int, dtype: torch.dtype | None) -> Tensor:
        view = self.values.view(n_tokens)
        return view if dtype is None else view.to(dtype)

    def truncate(self, n_tokens: int) -> None:
        pass

    def used(self, n_tokens: int) -> dict[str, int]:
        return {"values": n_tokens}

    def room(self, n_tokens: int) -> int:
        return self.values.capacity - n_tokens

    def counts(self, state: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return the tokens of a state that are in blocks, and all of them."""
        return 0, state["values"].shape[2]

    def restore(self, state: Mapping[str, Tensor]) -> int:
        return self.counts(state)[1]

    def extend(self, max_tokens: int) -> None:
        self.values.limit = max_tokens

    def row(self, index: int, n_rows: int = 1) -> ExactStore:
        alone = copy.copy(self)
        alone.values = self.values.row(index, n_rows)
        return alone


class BlockStore:
    """Older tokens as quantised blocks, the most recent ones in bfloat16.

    A token's features of all heads are concatenated, [K*D], and split into N blocks, so that heads narrower than
    a block share it and only the last block is padded. Codes [B, N, S, code bytes] and scales [B, N, S, 1] are
    separate, each block's plane contiguous along the tokens, a token's codes 16 or 32 bytes.

    The tail holds up to 2 * `tail_tokens`. An append first quantises whole tiles of `tail_tokens` among the tokens
    that were there before, then joins the new ones to the tail; where they do not fit, whole tiles are quantised at
    once until less than a tile is left. So one-token steps keep between 1 and `tail_tokens` in 16 bits, a token is
    rounded to 16 bits before it is quantised, in whatever chunks it came, and taking back the tokens of the last
    append (at most `tail_tokens` of them) restores exactly what was there. Taking back more leaves quantised
    what has been quantised, and the tail begins after it. A cache of at most 2 * `tail_tokens` in all stays in 16 bits.

    With `rotate` each head's features go through the Hadamard rotation before they are quantised, and back when read.
    """

    def __init__(
        self,
        kind: str,
        *,
        batch_size: int,
        n_heads: int,
        width: int,
        max_tokens: int,
        device: torch.device | str,
        static: bool,
        tail_tokens: int,
        rotate: bool,
    ) -> None:
        self.format = get_block_format(kind)
        self.n_heads, self.width = n_heads, width
        self.tail_tokens, self.rotate = tail_tokens, rotate
        self.n_packed = 0
        self.only_tail = max_tokens <= 2 * tail_tokens

        def buffer(lanes: int, features: int, dtype: torch.dtype, limit: int) -> TokenBuffer:
            return TokenBuffer(batch_size, lanes, features, dtype=dtype, limit=limit, device=device, static=static)

        n_blocks = self.format.block.n_blocks(n_heads * width)
        packed_limit = 0 if self.only_tail else -(-max_tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS
        self.codes = buffer(n_blocks, self.format.code_width, self.format.code_dtype, packed_limit)
        self.scales = buffer(n_blocks, 1, self.format.scale_dtype, packed_limit)
        self.tail = buffer(n_heads, width, TAIL_DTYPE, min(2 * tail_tokens, max_tokens))

    @property
    def buffers(self) -> dict[str, TokenBuffer]:
        return {"codes": self.codes, "scales": self.scales, "tail": self.tail}

    def append(self, values: Tensor, n_tokens: int) -> None:
        self.pack(n_tokens)
        held = n_tokens - self.n_packed
        if held + values.shape[2] <= self.tail.limit:
            self.tail.write(held, values)
        else:
            self._pack_tiles(torch.cat((self.tail.view(held), values.to(TAIL_DTYPE)), dim=2))

    def pack(self, n_tokens: int) -> bool:
        """Quantise what an append to `n_tokens` tokens quantises first, and return whether there was any."""
        held = n_tokens - self.n_packed
        if held < self.tail_tokens or self.only_tail:
            return False
        self._pack_tiles(self.tail.view(held))
        return True

    def read(self, n_tokens: int, dtype: torch.dtype | None) -> Tensor:
        dtype = dtype or torch.float32
        tail = self.tail.view(n_tokens - self.n_packed).to(dtype)
        return torch.cat((self._unpack(dtype), tail), dim=2) if self.n_packed else tail

    def truncate(self, n_tokens: int) -> None:
        self.n_packed = min(self.n_packed, n_tokens)

    def used(self, n_tokens: int) -> dict[str, int]:
        return {"codes": self.n_packed, "scales": self.n_packed, "tail": n_tokens - self.n_packed}

    def room(self, n_tokens: int) -> int:
        """Return how many tokens the tail takes behind those stored, before any of it is packed."""
        return self.tail.capacity - (n_tokens - self.n_packed)

    def extend(self, max_tokens: int) -> None:
        raise ConfigError(
            f"KV cache: a quantised cache cannot grow to {max_tokens} tokens; make it with a larger max_tokens"
        )

    def row(self, index: int, n_rows: int = 1) -> BlockStore:
        alone = copy.copy(self)
        alone.codes, alone.scales, alone.tail = (part.row(index, n_rows) for part in self.buffers.values())
        return alone

    def counts(self, state: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return the tokens of a state that are in blocks, and all of them.

        Raises:
            ConfigError: codes and scales of unlike numbers of tokens.
        """
        if state["codes"].shape[2] != state["scales"].shape[2]:
            raise ConfigError(
                f"KV cache state: {state['codes'].shape[2]} tokens of codes and {state['scales'].shape[2]} of scales; "
                "the state is damaged, make it again"
            )
        n_packed = state["codes"].shape[2]
        return n_packed, n_packed + state["tail"].shape[2]

    def restore(self, state: Mapping[str, Tensor]) -> int:
        self.n_packed, n_tokens = self.counts(state)
        return n_tokens

    def _pack_tiles(self, recent: Tensor) -> None:
        """Quantise the whole tiles of [B, K, T, D] in order, and keep the rest as the tail."""
        whole = recent.shape[2] // self.tail_tokens * self.tail_tokens
        rest = recent[:, :, whole:].clone()
        for part in recent[:, :, :whole].split(PACK_TOKENS, dim=2):
            rows = (hadamard(part) if self.rotate else part).transpose(1, 2).flatten(2)
            codes, scales = quantize(rows, self.format.kind)
            self.codes.write(self.n_packed, codes.transpose(1, 2))
            self.scales.write(self.n_packed, scales.transpose(1, 2)[..., None])
            self.n_packed += part.shape[2]
        self.tail.write(0, rest)

    def _unpack(self, dtype: torch.dtype) -> Tensor:
        codes = self.codes.view(self.n_packed).transpose(1, 2)
        scales = self.scales.view(self.n_packed).transpose(1, 2)[..., 0]
        kept = torch.float32 if self.rotate else dtype
        rows = dequantize(codes, scales, self.format.kind, self.n_heads * self.width, kept)
        heads = rows.unflatten(2, (self.n_heads, self.width)).transpose(1, 2)
        return hadamard(heads).to(dtype) if self.rotate else heads


Store = ExactStore | BlockStore
"""Storage of a stream [B, K, S, D]; the cache tensor counts S and checks the input."""
