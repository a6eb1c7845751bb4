"""The state of a decode step that the device counts by itself, so that it can be compiled or replayed as a graph."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from caramba.cache.context import Context
from caramba.cache.layer import LayerCache
from caramba.config.kvcache import EXACT_KINDS
from caramba.errors import CacheFull, ConfigError
from caramba.ops import StoredStream


class DeviceContext:
    """Takes a context's place in forwards of one token per sequence, with the lengths in tensors on the device.

    A forward is then a function of tensors of fixed shape and address: it reads `held`, writes behind it into the
    context's own buffers, and adds one to it. The host counts beside it:

        step = DeviceContext(ctx)      # ctx has seen a prompt
        step.advance()               # on the host: refuses a full cache, counts the token
        model(token, step)           # or the replay of a graph that did this

    `ctx` holds the tokens as if it had stored them itself and goes on where the steps end. A rollback is told by
    `truncate`, whatever else changes it by `sync_from_host`; after `select` or `load_state_dict` a new step is made.

    The tail of a quantised cache becomes blocks between two steps, in `advance`: the host counts, so it knows when,
    and a step itself stays the same work in the same memory, with `packed` a tensor that it reads.

    Attributes:
        places: where in the caches' `allocations` this step's token goes, int32 [B], once a forward has begun.
        packed: tokens that each sequence holds as blocks, int32 [B], None where no stream is quantised.
        held: tokens stored before this step, int32 [B].
        seqlens: those with this step's, int32 [B], once a forward has begun.
        offset: position of this step's token, once a forward has begun, int32 [B, 1].
        width: tokens per sequence that a forward takes.
        angles: cosines and sines of this step's positions, by frequencies that layers share or by who has them.
        apart: who has frequencies of their own, None until a forward has looked for them. Layers that are swapped for
            others later make their own angles.

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
            self.held = torch.full((some.batch_size,), ctx.position, dtype=torch.int32, device=some.device)
            self.packed = None if n_packed is None else torch.full_like(self.held, n_packed)
        self.seqlens, self.offset, self.places = self.held, self.held.clone()[:, None], self.held
        self.limit = min(tensor.max_tokens for cache in ctx.caches for tensor in cache.tensors.values())
        self._cursor = 0
        self.angles: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        self.apart: Sequence[Any] | None = None

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
        """Go on, on the device, from where the context is."""
        self.held.fill_(self.ctx.position)
        if self.packed is not None:
            self.packed.fill_(self.ctx.n_packed or 0)

    def truncate(self, n_tokens: int) -> None:
        """Roll the context back to its first `n_tokens` tokens, on the host and on the device."""
        self.ctx.truncate(n_tokens)
        self.sync_from_host()

    def begin(self) -> None:
        """Start a forward."""
        self._cursor, self.angles = 0, {}
        self.seqlens = self.held + 1
        # No view of `held`: a compiled graph that changes it takes no second name for it beside quantised weights.
        self.offset = self.held.clone()[:, None]
        self.places = self.held if self.packed is None else self.held - self.packed

    def next_cache(self) -> LayerCache:
        """Return the cache of the attention application that runs now, and advance to the following one."""
        if self._cursor == len(self.ctx.caches):
            raise ConfigError(
                f"context: attention application {self._cursor + 1} has no cache, the context was made for "
                f"{len(self.ctx.caches)}; make it with this model's new_context()"
            )
        self._cursor += 1
        return self.ctx.caches[self._cursor - 1]

    def stored(self, cache: LayerCache) -> Mapping[str, StoredStream]:
        """Return the streams of a cache as they lie in memory."""
        return cache.stored()

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
        self.held.add_(1)


def refusal(ctx: Context, *, is_packed: bool = False) -> str | None:
    """Return why steps on a context cannot run by themselves on the device, None where they can.

    `is_packed` says that somebody quantises the tail of a quantised cache between the steps.
    """
    if not ctx.caches:
        return "the model has no cache"
    for cache in ctx.caches:
        if cache.is_for_host:
            return "a layer of your own reads its cache from the host"
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
