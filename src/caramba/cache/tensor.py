"""Storage of one cached stream: the keys or values of one attention application, token after token."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caramba.cache.store import BlockStore, ExactStore, Store
from caramba.config.kvcache import BLOCKS, KVCacheKind
from caramba.errors import CacheFull, ConfigError
from caramba.ops.dba_decode import StoredStream

DTYPES = {KVCacheKind.FP32: torch.float32, KVCacheKind.FP16: torch.float16, KVCacheKind.BF16: torch.bfloat16}
TAIL_TOKENS = 64


@dataclass(frozen=True)
class KVCacheTensorConfig:
    """Format of one cached tensor.

    Attributes:
        kind: fp32, fp16 and bf16 are stored as such; q8_0, q4_0 and nf4 in blocks.
        tail_tokens: a quantised kind keeps the most recent tokens in bfloat16 and quantises this many at a time.
        hadamard: a quantised kind rotates each head's features before, so that an outlier costs its block less.
    """

    kind: KVCacheKind = KVCacheKind.FP32
    tail_tokens: int = TAIL_TOKENS
    hadamard: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the storage is numbers of one type."""
        return self.kind in DTYPES

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the storage of an exact kind.

        Raises:
            ConfigError: the kind is quantised, or a policy that has not been resolved.
        """
        if self.kind not in DTYPES:
            raise ConfigError(f"KV cache: kind={self.kind} has no element type; use one of: {', '.join(DTYPES)}")
        return DTYPES[self.kind]

    def check(self) -> None:
        """Refuse a format that no storage has.

        Raises:
            ConfigError: a policy that has not been resolved to a kind, or a tail of less than one token.
        """
        known = (*DTYPES, *BLOCKS)
        if self.kind not in known:
            raise ConfigError(
                f"KV cache: kind={self.kind} is a policy that has not been resolved to a format; "
                f"use one of: {', '.join(known)}"
            )
        if self.tail_tokens < 1:
            raise ConfigError(f"KV cache: got tail_tokens={self.tail_tokens}, expected 1 or more")


def open_store(config: KVCacheTensorConfig, **shape: Any) -> Store:
    """Return empty storage for a format; `shape` is what `ExactStore` takes besides its dtype."""
    if config.is_exact:
        return ExactStore(config.dtype, **shape)
    return BlockStore(config.kind, tail_tokens=config.tail_tokens, rotate=config.hadamard, **shape)


class KVCacheTensor:
    """One cached stream of one attention application, [B, K, S, D] in the config's format.

    `static` allocates `max_tokens` at once; otherwise buffers grow geometrically up to it. fp16, bf16 and the
    quantised kinds round what is appended; `BlockStore` documents when a quantised kind rounds which tokens.

    A cache stores no autograd graph: appending a tensor that requires grad is an error, because an in-place write
    would drop its gradient silently.
    """

    def __init__(
        self,
        config: KVCacheTensorConfig,
        *,
        batch_size: int,
        n_heads: int,
        width: int,
        max_tokens: int,
        device: torch.device | str = "cpu",
        static: bool = False,
    ) -> None:
        if batch_size < 1 or max_tokens < 1:
            raise ConfigError(f"KV cache: got batch_size={batch_size}, max_tokens={max_tokens}; both are at least 1")
        config.check()
        self.config, self.is_exact = config, config.is_exact
        self.batch_size, self.n_heads, self.width = batch_size, n_heads, width
        self.max_tokens = max_tokens
        self.n_tokens = 0
        shape = {"batch_size": batch_size, "n_heads": n_heads, "width": width, "max_tokens": max_tokens}
        self.store = open_store(config, **shape, device=device, static=static)
        self.device = next(iter(self.store.buffers.values())).data.device

    @property
    def capacity(self) -> int:
        """Tokens per sequence that the allocated buffers of whole-length storage hold."""
        return next(iter(self.store.buffers.values())).capacity

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocated buffers, the whole batch together."""
        return sum(buffer.nbytes for buffer in self.store.buffers.values())

    @property
    def used_bytes(self) -> int:
        """Bytes of the parts of the buffers that hold tokens, the whole batch together."""
        return self._bytes(self.store.used(self.n_tokens))

    @property
    def tail_bytes(self) -> int:
        """Bytes, of those used, of the tokens that a quantised kind still has in 16 bits."""
        return self._bytes({name: n for name, n in self.store.used(self.n_tokens).items() if name == "tail"})

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes for good: codes, scales and padding, once out of the tail."""
        return sum(buffer.token_bytes for name, buffer in self.store.buffers.items() if name != "tail")

    def append(self, values: Tensor) -> None:
        """Add the next tokens behind those already stored.

        Args:
            values: [B, K, T, D], any floating dtype.

        Raises:
            CacheFull: more tokens than `max_tokens`.
            ConfigError: a shape, dtype or device that does not fit, or tracked gradients.
        """
        self.check_append(values)
        self.put(values)

    def put(self, values: Tensor) -> None:
        """Add tokens that `check_append` has let pass."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                self.store.append(values, self.n_tokens)
        else:  # a decode step: entering the block takes as long as the write
            self.store.append(values, self.n_tokens)
        self.n_tokens += values.shape[2]

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the stored tokens, [B, K, S, D], in `dtype`.

        Without one, an exact kind returns a view in its own type, a quantised one float32.
        """
        return self.store.read(self.n_tokens, dtype)

    def storage(self) -> StoredStream:
        """Return the whole allocation without a copy, with the name of its format."""
        if isinstance(self.store, BlockStore):
            return StoredStream(self.config.kind, self.store.codes.data, self.store.scales.data, self.store.tail.data)
        return StoredStream(self.config.kind, self.store.buffers["values"].data)

    @property
    def n_packed(self) -> int | None:
        """Tokens stored as quantised blocks, the others being in the tail; None for an exact kind."""
        return self.store.n_packed if isinstance(self.store, BlockStore) else None

    def pack(self, n_tokens: int) -> bool:
        """Quantise what an append to `n_tokens` tokens quantises first, and return whether there was any."""
        return isinstance(self.store, BlockStore) and self.store.pack(n_tokens)

    def advance(self, n_tokens: int) -> None:
        """Count `n_tokens` more tokens, which the caller writes to the last buffer itself.

        The last buffer of a quantised kind is its tail.

        Raises:
            CacheFull: more tokens than are allocated.
        """
        room = self.store.room(self.n_tokens)
        if n_tokens > room:
            raise CacheFull(
                f"KV cache: {n_tokens} more tokens do not fit the {room} that are allocated behind {self.n_tokens}"
            )
        self.n_tokens += n_tokens

    def truncate(self, n_tokens: int) -> None:
        """Discard every token from `n_tokens` on; the allocation is kept."""
        if not 0 <= n_tokens <= self.n_tokens:
            raise ConfigError(f"KV cache: truncate to {n_tokens} tokens, expected 0 to {self.n_tokens} (those stored)")
        self.store.truncate(n_tokens)
        self.n_tokens = n_tokens

    def extend(self, max_tokens: int) -> None:
        """Allow up to `max_tokens` tokens, if that is more than before. Memory is taken when they come.

        Raises:
            ConfigError: a quantised format, whose buffers have their sizes from the first limit.
        """
        if max_tokens > self.max_tokens:
            self.store.extend(max_tokens)
            self.max_tokens = max_tokens

    def select(self, rows: Tensor) -> None:
        """Keep the sequences `rows`, [B'] integers, in that order; one may come more than once.

        Raises:
            ConfigError: no rows, rows that are no integers, or ones on the host that are not there.
        """
        if rows.dim() != 1 or rows.shape[0] < 1 or rows.dtype not in (torch.int32, torch.int64):
            raise ConfigError(
                f"KV cache: got rows {rows.dtype} of shape {tuple(rows.shape)}, expected integers of shape [B'], B' > 0"
            )
        # Rows on a GPU are not waited for: there an index that is none stops the device.
        if rows.is_cpu and not (int(rows.min()) >= 0 and int(rows.max()) < self.batch_size):
            raise ConfigError(
                f"KV cache: got rows {rows.tolist()[:8]}, expected numbers from 0 to {self.batch_size - 1}"
            )
        for buffer in self.store.buffers.values():
            buffer.select(rows)
        self.batch_size = rows.shape[0]

    def row(self, index: int, n_rows: int = 1) -> "KVCacheTensor":
        """Return the stream of one sequence, or of `n_rows`: it counts its own tokens, in this one's memory.

        Raises:
            ConfigError: sequences that are not there.
        """
        if not 0 <= index <= self.batch_size - n_rows or n_rows < 1:
            raise ConfigError(
                f"KV cache: got rows {index} to {index + n_rows - 1}, expected some from 0 to {self.batch_size - 1}"
            )
        alone = copy.copy(self)
        alone.batch_size, alone.store = n_rows, self.store.row(index, n_rows)
        return alone

    @property
    def memory(self) -> list[Tensor]:
        """All that is allocated, in use or not."""
        return [buffer.data for buffer in self.store.buffers.values()]

    def clone(self) -> "KVCacheTensor":
        """Return a copy that shares no memory."""
        with torch.inference_mode(False):
            return copy.deepcopy(self)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of what is stored, by buffer, without the unused capacity."""
        used = self.store.used(self.n_tokens)
        return {name: buffer.view(used[name]).clone() for name, buffer in self.store.buffers.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the content of another cache of the same format and batch.

        Raises:
            ConfigError: another format, batch or width; nothing is changed.
            CacheFull: more tokens than fit; nothing is changed.
        """
        self.check_state(state)
        self.n_tokens = self.store.restore(state)
        for name, tensor in state.items():
            self.store.buffers[name].write(0, tensor)

    def check_state(self, state: Mapping[str, Tensor]) -> tuple[int, int]:
        """Refuse what `load_state_dict` does not take; return the tokens of a state, and those in blocks.

        Raises:
            ConfigError: another format, batch or width.
            CacheFull: more tokens than fit.
        """
        buffers = self.store.buffers
        if set(state) != set(buffers):
            raise ConfigError(
                f"KV cache state: got {sorted(state)}, kind={self.config.kind} holds {sorted(buffers)}; "
                "load it into a cache of the kind that it was saved from"
            )
        for name, tensor in state.items():
            data, limit = buffers[name].data, buffers[name].limit
            expected = (*data.shape[:2], "T", data.shape[3])
            got = tuple(tensor.shape)
            if tensor.dtype != data.dtype or len(got) != 4 or (*got[:2], got[3]) != (*data.shape[:2], data.shape[3]):
                raise ConfigError(
                    f"KV cache state: {name} is {tensor.dtype} {list(got)}, expected {data.dtype} {list(expected)}; "
                    "load it into a cache of the same model, kind and batch size"
                )
            if got[2] > limit:
                raise CacheFull(
                    f"KV cache state: {got[2]} tokens of {name} do not fit {limit}; make the cache with the "
                    f"max_tokens and tail_tokens that it was saved with (here {self.max_tokens})"
                )
        n_packed, n_tokens = self.store.counts(state)
        if n_tokens > self.max_tokens:
            raise CacheFull(f"KV cache state: {n_tokens} tokens do not fit max_tokens={self.max_tokens}")
        return n_tokens, n_packed

    def _bytes(self, tokens: Mapping[str, int]) -> int:
        return sum(self.store.buffers[name].used_bytes(n_tokens) for name, n_tokens in tokens.items())

    def check_append(self, values: Tensor) -> None:
        """Refuse what `append` does not take.

        Raises:
            CacheFull: more tokens than `max_tokens`.
            ConfigError: a shape, dtype or device that does not fit, or tracked gradients.
        """
        shape = values.shape
        if len(shape) != 4 or shape != (self.batch_size, self.n_heads, shape[2], self.width):
            raise ConfigError(
                f"KV cache: got shape {tuple(shape)}, expected [{self.batch_size}, {self.n_heads}, T, "
                f"{self.width}]; make the context with this model's new_context() and the same batch size"
            )
        if not values.is_floating_point():
            raise ConfigError(f"KV cache: got a tensor of {values.dtype}, expected a floating dtype")
        if values.device != self.device:
            raise ConfigError(
                f"KV cache: got a tensor on {values.device}, the cache is on {self.device}; "
                "make the context after the model is moved"
            )
        refuse_gradients(values)
        end = self.n_tokens + shape[2]
        if end > self.max_tokens:
            raise CacheFull(
                f"KV cache: {end} tokens do not fit max_tokens={self.max_tokens}; "
                "make the context with a larger max_tokens, or truncate it"
            )


def refuse_gradients(values: Tensor) -> None:
    """Refuse to store a tensor that autograd follows.

    Raises:
        ConfigError: it does.
    """
    if values.requires_grad and torch.is_grad_enabled():
        raise ConfigError(
            "KV cache: cannot store a tensor that autograd follows; "
            "run a forward with a context under torch.no_grad() or torch.inference_mode()"
        )
