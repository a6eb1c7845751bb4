"""Cache state with lengths counted on the device, so that decode steps can be compiled or captured in a graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from caramba.cache.context import Context
from caramba.cache.layer import LayerCache
from caramba.config.kvcache import EXACT_KINDS
from caramba.errors import CacheFull, ConfigError
from caramba.ops.dba_decode import StoredStream


class DeviceContext:
    """Replaces a `Context` in forwards of one token per sequence; lengths are tensors on the device.

    A forward is then a function of tensors of fixed shape and address: it reads `device_lengths`, writes the new token
    after them into the context's buffers, and adds one. The host counts too:

        step = DeviceContext(ctx)      # ctx has seen a prompt
        step.advance()               # on the host: refuses a full cache, counts the token
        model(token, step)           # or the replay of a graph that did this

    `ctx` stores the tokens as if it had run the steps itself, and can continue after them. Call `truncate` for a
    rollback and `sync_from_host` after any other change; after `select` or `load_state_dict` make a new step.

    The tail of a quantised cache becomes blocks between two steps, in `advance`: the host counts, so it knows when,
    and a step itself stays the same work in the same memory, with `packed` a tensor that it reads.

    Attributes:
        places: where in the caches' `allocations` this step's token goes, int32 [B], once a forward has begun.
        packed: tokens that each sequence stores as quantised blocks, int32 [B]; None if no stream is quantised.
        device_lengths: tokens stored before this step, int32 [B].
        seqlens: tokens stored including this step's, int32 [B], once a forward has begun.
        offset: position of this step's token, once a forward has begun, int32 [B, 1].
        width: tokens per sequence that a forward takes.
        angles: cosines and sines of this step's positions, by shared frequencies or by rotary module.
        separate_ropes: rotary modules with their own frequencies; None until the first forward collects them. Layers
            that are replaced later compute their own angles.

    Raises:
        ConfigError: a context that `refusal` names a reason for.
    """

    width = 1

    def __init__(self, ctx: Context) -> None:
        reason = self.refusal(ctx)
        if reason is not None:
            raise ConfigError(f"decode step on the device: {reason}; decode with the context itself")
        some = next(iter(ctx.caches[0].tensors.values()))
        self.ctx = ctx
        n_packed = ctx.n_packed
        with torch.inference_mode(False):
            self.device_lengths = torch.full(
                (some.batch_size,), ctx.position, dtype=torch.int32, device=some.device
            )
            self.packed = None if n_packed is None else torch.full_like(self.device_lengths, n_packed)
        self.seqlens, self.offset, self.places = (
            self.device_lengths,
            self.device_lengths.clone()[:, None],
            self.device_lengths,
        )
        self.limit = min(tensor.max_tokens for cache in ctx.caches for tensor in cache.tensors.values())
        self._cursor = 0
        self.angles: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        self.separate_ropes: Sequence[Any] | None = None

    @classmethod
    def refusal(cls, ctx: Context) -> str | None:
        """Return why steps on a context cannot run by themselves on the device, None where they can."""
        return refusal(ctx, is_packed=True)

    def advance(self) -> None:
        """Count on the host the token that the next forward adds.

        Raises:
            CacheFull: the buffers have no place for it; nothing is changed.
        """
        end = self.ctx.position + 1
        if end > self.limit:
            raise CacheFull(
                f"KV cache: {end} tokens do not fit max_tokens={self.limit}; "
                "make the context with a larger max_tokens, or truncate it"
            )
        if self.packed is not None and self.ctx.pack(end - 1):
            self.packed.fill_(self.ctx.n_packed or 0)
        for cache in self.ctx.caches:
            cache.advance(1)
        self.ctx.position = end

    def sync_from_host(self) -> None:
        """Set the device's lengths from the context's position."""
        self.device_lengths.fill_(self.ctx.position)
        if self.packed is not None:
            self.packed.fill_(self.ctx.n_packed or 0)

    def truncate(self, n_tokens: int) -> None:
        """Roll the context back to its first `n_tokens` tokens, on the host and on the device."""
        self.ctx.truncate(n_tokens)
        self.sync_from_host()

    def begin(self) -> None:
        """Start a forward."""
        self._cursor, self.angles = 0, {}
        self.seqlens = self.device_lengths + 1
        # A clone: with quantised weights, a compiled graph that mutates `device_lengths` cannot take an alias of it.
        self.offset = self.device_lengths.clone()[:, None]
        self.places = self.device_lengths if self.packed is None else self.device_lengths - self.packed

    def next_cache(self) -> LayerCache:
        """Return the cache of the attention application that runs now, and advance to the following one."""
        if self._cursor == len(self.ctx.caches):
            raise ConfigError(
                f"context: attention application {self._cursor + 1} has no cache, the context was made for "
                f"{len(self.ctx.caches)}; make it with this model's new_context()"
            )
        self._cursor += 1
        return self.ctx.caches[self._cursor - 1]

    def storage(self, cache: LayerCache) -> Mapping[str, StoredStream]:
        """Return the streams of a cache as allocated, without a copy."""
        return cache.storage()

    def commit(self, n_tokens: int) -> None:
        """End a forward: the device counts its token.

        Raises:
            ConfigError: more than one token per sequence, or an attention application took no cache.
        """
        if n_tokens != 1 or self._cursor != len(self.ctx.caches):
            raise ConfigError(
                f"context: {n_tokens} tokens in {self._cursor} of {len(self.ctx.caches)} caches, expected 1 token in "
                "all; feed a decode step one token per sequence, with a context of this model"
            )
        self.angles = {}
        self._count()

    def _count(self) -> None:
        self.device_lengths.add_(1)


def refusal(ctx: Context, *, is_packed: bool = False) -> str | None:
    """Return why steps on a context cannot run by themselves on the device, None where they can.

    `is_packed` is True if the caller quantises the tail of a quantised cache between the steps.
    """
    if not ctx.caches:
        return "the model has no cache"
    for cache in ctx.caches:
        if cache.is_for_host:
            return "a layer reads its cache from the host"
        if is_packed and cache.is_rotated:
            return "the cache is Hadamard-rotated"
        kinds = {tensor.config.kind for tensor in cache.tensors.values()}
        quantised = sorted(kinds.difference(EXACT_KINDS))
        if cache.keeps_first_tokens:
            return "a layer keeps its first tokens at full precision"
        if quantised and not is_packed:
            return f"the cache is quantised ({', '.join(quantised)}) and its tail is packed by the host"
        parts = [part for tensor in cache.tensors.values() for part in tensor.store.buffers.values()]
        if any(part.capacity < part.limit for part in parts):
            return "the cache grows; make it with static=True"
    return None
