"""The state of a generation: one cache per attention application and the position reached."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from caramba.cache.layer import LayerCache
from caramba.errors import ConfigError


class Context:
    """Caches of one batch of sequences that advance together, and how many tokens they hold.

    `position` is the number of tokens that finished forwards have seen; the next token's position is
    `position` (positions count from 0). A forward over T tokens is

        ctx.begin()          # cursor to the first cache
        ...                  # every attention application takes ctx.next_cache(), in execution order
        ctx.commit(T)        # position += T

    A model does this itself. A caller that runs a single layer or topology with a context calls `begin` and `commit`
    itself. There is one cache per *application*: a CyclicTopology's attention takes one per cycle, a
    RecurrentTopology's one per step, because each pass through shared weights sees other inputs.

    Between `begin` and `commit` the caches run ahead of `position`. A forward that raised leaves them so; the
    next `begin` rolls them back, hence a context survives a failed forward unchanged.
    """

    def __init__(self, caches: Sequence[LayerCache]) -> None:
        self.caches = tuple(caches)
        self.position = 0
        self._cursor = 0
        self._lengths: tuple[tuple[int, int | None], Tensor, Tensor | None] | None = None

    @property
    def offset(self) -> int:
        """Position of the next forward's first token."""
        return self.position

    def begin(self) -> None:
        """Start a forward: the next cache is the first, and every cache holds exactly `position` tokens."""
        self._cursor = 0
        for cache in self.caches:
            cache.truncate(self.position)

    def next_cache(self) -> LayerCache:
        """Return the cache of the attention application that runs now, and advance to the following one."""
        if self._cursor == len(self.caches):
            raise ConfigError(
                f"context: attention application {self._cursor + 1} has no cache, the context was made for "
                f"{len(self.caches)}; make it with this model's new_context(), call begin() before a forward"
            )
        self._cursor += 1
        return self.caches[self._cursor - 1]

    def commit(self, n_tokens: int) -> None:
        """End a forward over `n_tokens` tokens.

        Raises:
            ConfigError: an attention application took no cache or stored another number of tokens.
        """
        end = self.position + n_tokens
        if self._cursor != len(self.caches) or any(cache.n_tokens != end for cache in self.caches):
            raise ConfigError(
                f"context: {self._cursor} of {len(self.caches)} caches were used, holding "
                f"{[cache.n_tokens for cache in self.caches]} tokens where {end} were expected; "
                "make the context with this model's new_context()"
            )
        self.position = end

    def lengths(self, cache: LayerCache) -> tuple[Tensor, Tensor | None]:
        """Return device tensors of the tokens stored, int32 [B], and of those in blocks, int32 [1] or None.

        All applications of a forward store the same number, so they share one pair of tensors.
        """
        some = next(iter(cache.tensors.values()))
        counts, known = (cache.n_tokens, cache.n_packed), self._lengths
        if (
            known is not None
            and known[0] == counts
            and known[1].shape[0] == some.batch_size
            and known[1].device == some.device
        ):
            return known[1], known[2]
        whole = torch.full((some.batch_size,), counts[0], dtype=torch.int32, device=some.device)
        packed = None if counts[1] is None else torch.full((1,), counts[1], dtype=torch.int32, device=some.device)
        self._lengths = counts, whole, packed
        return whole, packed

    def truncate(self, n_tokens: int) -> None:
        """Roll every cache and the position back to the first `n_tokens` tokens, as if no more had been
        seen."""
        if not 0 <= n_tokens <= self.position:
            raise ConfigError(f"context: truncate to {n_tokens} tokens, expected 0 to {self.position} (those seen)")
        self.position = n_tokens
        for cache in self.caches:
            cache.truncate(n_tokens)

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, [B'] integers, in that order: a batch that reorders, shrinks or fans out."""
        for cache in self.caches:
            cache.select(rows)

    def pack(self, n_tokens: int) -> bool:
        """Quantise the tail tokens that a forward after `n_tokens` tokens would quantise first.

        Return True if there were any. All caches store the same number of blocks, so the first one decides.
        """
        if not self.caches or not self.caches[0].pack(n_tokens):
            return False
        for cache in self.caches[1:]:
            cache.pack(n_tokens)
        return True

    @property
    def n_packed(self) -> int | None:
        """Tokens stored as quantised blocks, the same number in every cache; None if none is quantised."""
        return next((cache.n_packed for cache in self.caches if cache.n_packed is not None), None)

    def row(self, index: int, n_rows: int = 1) -> "Context":
        """Return a context of sequences `index` to `index` + `n_rows` that shares this one's memory.

        The new context counts its own position.

        Raises:
            ConfigError: the buffers can grow, and would then no longer share memory.
        """
        stores = [tensor.store for cache in self.caches for tensor in cache.tensors.values()]
        if any(part.capacity < part.limit for store in stores for part in store.buffers.values()):
            raise ConfigError("context: a row of a cache that grows shares no memory; make it with static=True")
        alone = Context([cache.row(index, n_rows) for cache in self.caches])
        alone.position = self.position
        return alone

    def clear(self) -> None:
        """Discard every token, and overwrite all allocated memory with zeros."""
        self.truncate(0)
        # One kernel launch: other rows wait for their next token meanwhile.
        torch._foreach_zero_([part for cache in self.caches for part in cache.memory])  # pyright: ignore[reportPrivateImportUsage]

    def clone(self) -> "Context":
        """Return an independent copy that shares no memory."""
        copied = Context([cache.clone() for cache in self.caches])
        copied.position = self.position
        return copied

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what every cache stores, by `application.stream.buffer`, for a safetensors file, say."""
        return {
            f"{index}.{key}": values
            for index, cache in enumerate(self.caches)
            for key, values in cache.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the content and position of a context of the same model, batch and format.

        Raises:
            ConfigError: the state of another model, batch or format; the context is then empty.
        """
        parts: list[dict[str, Tensor]] = [{} for _ in self.caches]
        for key, values in state.items():
            index, _, rest = key.partition(".")
            if not index.isdecimal() or int(index) >= len(parts):
                raise ConfigError(
                    f"context: the state has {key!r}, expected caches 0 to {len(parts) - 1}; "
                    "load it into a context of the model that it was saved from"
                )
            parts[int(index)][rest] = values
        self.truncate(0)
        try:
            for cache, part in zip(self.caches, parts, strict=True):
                cache.load_state_dict(part)
            lengths = {cache.n_tokens for cache in self.caches}
            if len(lengths) > 1:
                raise ConfigError(
                    f"context: the state's caches hold {sorted(lengths)} tokens, expected one number; "
                    "the state is damaged, make it again"
                )
        except ConfigError:
            self.begin()
            raise
        self.position = min(lengths, default=0)

    def nbytes(self) -> int:
        """Return the bytes of all allocated cache buffers, summed from the tensors."""
        return sum(cache.allocated_bytes for cache in self.caches)

    def used_bytes(self) -> int:
        """Return the bytes that the stored tokens take, summed from the tensors."""
        return sum(cache.used_bytes for cache in self.caches)

    def tail_bytes(self) -> int:
        """Return the bytes of the 16-bit tails of quantised caches, a part of `used_bytes`."""
        return sum(cache.tail_bytes for cache in self.caches)

    def first_bytes(self) -> int:
        """Return the bytes of exact first tokens, a part of `used_bytes`."""
        return sum(cache.first_bytes for cache in self.caches)

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token of one sequence, summed over all applications, once out of the 16-bit tail."""
        return sum(cache.bytes_per_token for cache in self.caches)
