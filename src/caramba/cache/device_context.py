"""Cache state with lengths counted on the device, so that decode steps can be compiled or captured in a graph.

Its slot cache keeps one sequence per slot, so that an engine may replace sequences between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from caramba.cache.context import Context
from caramba.cache.layer import LayerCache
from caramba.cache.view import CacheView
from caramba.config.kvcache import EXACT_KINDS
from caramba.errors import CacheFull, ConfigError
from caramba.ops.dba_append import dba_append
from caramba.ops.dba_decode import StoredStream

if TYPE_CHECKING:
    from caramba.cache.memory_bank import RingStep

IDLE = -1
"""Length of a slot that is not in use: it takes part in a forward, but reads and writes nothing and stays idle."""


class DeviceContext:
    """Replaces a `Context` in forwards of `width` tokens per sequence; lengths are tensors on the device.

    A forward is then a function of tensors of fixed shape and address: it reads `device_lengths`, writes the new tokens
    after them into the context's buffers, and adds their number. Three kinds differ in what the host counts:

        step = DeviceContext(ctx)               # ctx has seen a prompt; all rows advance by one token
        step.advance()                          # on the host: refuses a full cache, counts the token
        model(token, step)                      # or the replay of a graph that did this

        rows = DeviceContext.ragged(ctx, lengths)  # ctx has seen the rows' prompts, padded on the right
        rows.width = T
        model(tokens, rows)                     # [B, T], row b behind its own lengths[b] tokens
        rows.rewind(kept)

        slots = DeviceContext.slots(ctx)        # fill a slot through ctx.row(index), which shares memory
        slots.set_lengths(lengths)              # IDLE where a slot is not in use
        model(token, slots)

    In the first kind `ctx` stores the tokens as if it had run the steps itself, and can continue after them. Call
    `truncate` for a rollback and `sync_from_host` after any other change; after `select` or `load_state_dict` make a
    new one. The other two leave its counts as they are. Memory past a row's length is never read. Memory slots run in
    the first kind alone; a step that is repeated at its position, with its token, leaves them as they are. After a step
    that was counted and failed, fill a new context: slots cannot take a token back.

    The tail of a quantised cache becomes blocks between two steps, in `advance`, or by the caller of `set_lengths`:
    the host counts, so it knows when, and a step stays the same work in the same memory.

    Attributes:
        places: where in the caches' `allocations` this step's tokens go, int32 [B], once a forward has begun.
        packed: tokens that each sequence stores as quantised blocks, int32 [B]; None if no stream is quantised.
        device_lengths: tokens stored before this step, int32 [B].
        n_dropped: tokens that rings no longer hold, int32 [1], by `LayerCache.ring_size`.
        rings: what layers of equal rings share in a step, by the same.
        seqlens: tokens stored including this step's, int32 [B], once a forward has begun.
        offset: position of this step's tokens, once a forward has begun, int32 [B, T].
        width: tokens per sequence that a forward takes, at most `MAX_QUERIES` of the decode attention.
        lengths: `device_lengths` on the host, of ragged rows.
        last: largest position assigned to a token of ragged rows; padding tokens beyond it are clamped to it.
        visible: upper bound of the tokens that a forward reads, if the host knows one; None reads all that is
            allocated. It changes shapes, so it stays None if a forward is captured or compiled.
        angles: cosines and sines of this step's positions, by shared frequencies or by rotary module.
        separate_ropes: rotary modules with their own frequencies; None until the first forward collects them. Layers
            that are replaced later compute their own angles.

    Raises:
        ConfigError: a context that `refusal` names a reason for.
    """

    def __init__(self, ctx: Context, *, is_ragged: bool = False) -> None:
        reason = refusal(ctx, is_ragged=is_ragged)
        if reason is not None:
            raise ConfigError(f"decode step on the device: {reason}; decode with the context itself")
        some, sizes = ctx.caches[0], {cache.ring_size for cache in ctx.caches}
        self.ctx, n_packed = ctx, ctx.n_packed
        with torch.inference_mode(False):
            self.device_lengths = torch.full(
                (some.batch_size,), ctx.position, dtype=torch.int32, device=some.memory[0].device
            )
            self.packed = None if n_packed is None else torch.full_like(self.device_lengths, n_packed)
            self.n_dropped = {size: torch.zeros_like(self.device_lengths[:1]) for size in sizes if size}
        self.rings: dict[int, RingStep] = {}
        self.seqlens = self.places = self.device_lengths
        self.offset = self.device_lengths.clone()[:, None]
        limits = (tensor.max_tokens for cache in ctx.caches for tensor in cache.tensors.values())
        self.limit = min(limits, default=torch.iinfo(torch.int32).max)
        self.width = 1
        self.last = self.limit - 1
        self.lengths: list[int] = []
        self.visible: int | None = None
        self.is_ragged, self.has_slots = is_ragged, False
        self._cursor, self._is_counted = 0, False
        self.angles: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self.separate_ropes: Sequence[Any] | None = None
        self._reload_dropped()

    @classmethod
    def ragged(cls, ctx: Context, lengths: Sequence[int], last: int | None = None) -> DeviceContext:
        """Return a context of rows that each have a position of their own, and are rewound after a forward.

        Raises:
            ConfigError: a context that `refusal` names a reason for, or another number of rows.
        """
        rows = cls(ctx, is_ragged=True)
        rows.last = rows.last if last is None else last
        rows.rewind(lengths)
        return rows

    @classmethod
    def slots(cls, ctx: Context) -> DeviceContext:
        """Return a context of slots that are idle until `set_lengths`."""
        reason = refusal(ctx, has_slots=True)
        if reason is not None:
            raise ConfigError(f"decode step on the device: {reason}; decode with the context itself")
        slots = cls(ctx)
        slots.has_slots = True
        slots.device_lengths.fill_(IDLE)
        if slots.packed is not None:
            slots.packed.fill_(0)
        return slots

    def advance(self) -> None:
        """Count on the host the token that the next forward adds.

        Raises:
            CacheFull: the buffers have no place for it; nothing is changed.
        """
        end = self.ctx.position + 1
        self._refuse_full(end)
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
        self._reload_dropped()

    def _reload_dropped(self) -> None:
        counts = {cache.ring_size: cache.n_dropped for cache in self.ctx.caches}
        for size, n_dropped in self.n_dropped.items():
            n_dropped.fill_(counts[size])

    def truncate(self, n_tokens: int) -> None:
        """Roll the context back to its first `n_tokens` tokens, on the host and on the device."""
        self.ctx.truncate(n_tokens)
        self.sync_from_host()

    def rewind(self, lengths: Sequence[int]) -> None:
        """Set each ragged row's length; later tokens are discarded.

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

    def set_lengths(self, lengths: Sequence[int], packed: Sequence[int] | None = None) -> None:
        """Set every slot's length, or IDLE, and for a quantised cache the tokens that each stores as blocks."""
        _upload(lengths, self.device_lengths)
        if self.packed is not None and packed is not None:
            _upload(packed, self.packed)

    def begin(self) -> None:
        """Start a forward.

        Raises:
            CacheFull: a ragged row has no place for its tokens; nothing is changed.
        """
        stored = self.device_lengths
        if self.is_ragged and not self._is_counted:
            self._refuse_full(max(self.lengths) + self.width)
        self._cursor, self.angles, self.rings = 0, {}, {}
        self.seqlens = stored + self.width
        if self.is_ragged:
            steps = torch.arange(self.width, dtype=torch.int32, device=stored.device)
            self.offset = (stored[:, None] + steps).clamp(max=self.last)
        else:
            # A clone: with quantised weights, a compiled graph that mutates `device_lengths` cannot take an alias.
            self.offset = (stored.clamp(min=0) if self.has_slots else stored.clone())[:, None]
        self.places = stored if self.packed is None else stored - self.packed  # of an idle slot below 0

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
        """Return the streams of a cache as allocated, without a copy, cut to what is `visible`."""
        streams, end = cache.storage(), self.visible
        if end is None:
            return streams
        return {
            name: StoredStream(kind, values[:, :, :end], None if scales is None else scales[:, :, :end], tail)
            for name, (kind, values, scales, tail) in streams.items()
        }

    def view(self, cache: LayerCache) -> CacheView:
        """Return what a forward attends to in a cache, this step's tokens included."""
        return CacheView(self.storage(cache), self.seqlens, self.packed, 0)

    def write(self, streams: Mapping[str, Tensor]) -> CacheView:
        """Store this step's streams, [B, K, T, D] each, in the next cache; return what they attend to."""
        cache = self.next_cache()
        dba_append([streams[name] for name in cache.names], cache.allocations, self.places, None, None, -1)
        return self.view(cache)

    def commit(self, n_tokens: int) -> None:
        """End a forward: the device counts its tokens.

        Raises:
            ConfigError: another number of tokens than `width`, or an attention application took no cache.
        """
        if n_tokens != self.width or self._cursor != len(self.ctx.caches):
            raise ConfigError(
                f"context: {n_tokens} tokens in {self._cursor} of {len(self.ctx.caches)} caches, expected "
                f"{self.width} in all; set width to the tokens per row, with a context of this model"
            )
        self.angles, self.rings = {}, {}
        for size, n_dropped in self.n_dropped.items():
            n_dropped.copy_(torch.maximum(n_dropped, self.device_lengths[:1] + (1 - size)))
        self.device_lengths.add_((self.device_lengths >= 0).to(torch.int32) if self.has_slots else self.width)
        if self.is_ragged and not self._is_counted:
            self.lengths = [n + self.width for n in self.lengths]

    @contextlib.contextmanager
    def host_counted_forward(self) -> Iterator[None]:
        """Run a block with one forward over `width` tokens per ragged row, counted on the host after the block.

        Inside it a forward depends on tensors only, so it can be compiled, captured or repeated at the same positions.

        Raises:
            CacheFull: a row has no place for them; nothing is changed.
        """
        self._refuse_full(max(self.lengths) + self.width)
        self._is_counted = True
        try:
            yield
            self.lengths = [n + self.width for n in self.lengths]
        finally:
            self._is_counted = False

    def _refuse_full(self, end: int) -> None:
        if end > self.limit:
            raise CacheFull(
                f"KV cache: {end} tokens do not fit max_tokens={self.limit}; "
                "make the context with a larger max_tokens, or truncate it"
            )


def _upload(numbers: Sequence[int], into: Tensor) -> None:
    # A copy from unpinned memory would synchronise with the device.
    given = torch.tensor(numbers, dtype=torch.int32, pin_memory=into.is_cuda)
    into.copy_(given, non_blocking=into.is_cuda)


def refusal(ctx: Context, *, is_ragged: bool = False, has_slots: bool = False) -> str | None:
    """Return why steps on a context cannot run by themselves on the device, None where they can.

    The tail of a quantised cache is packed between steps, which rows that are rewound (`is_ragged`) do not allow.
    Neither these nor rows of an engine (`has_slots`) are at one position, as rings need them.
    """
    if not ctx.caches:
        return "the model has no cache"
    for cache in ctx.caches:
        if cache.is_for_host:
            return "a layer reads its cache from the host"
        if (is_ragged or has_slots) and cache.ring_size is not None:
            return "a layer with memory slots needs all rows at one position"
        if not is_ragged and cache.is_rotated:
            return "the cache is Hadamard-rotated"
        kinds = {tensor.config.kind for tensor in cache.tensors.values()}
        quantised = sorted(kinds.difference(EXACT_KINDS))
        if cache.keeps_first_tokens:
            return "a layer keeps its first tokens at full precision"
        if quantised and is_ragged:
            return f"the cache is quantised ({', '.join(quantised)}) and its tail is packed by the host"
        parts = [part for tensor in cache.tensors.values() for part in tensor.store.buffers.values()]
        if any(part.capacity < part.limit for part in parts):
            return "the cache grows; make it with static=True"
    return None
