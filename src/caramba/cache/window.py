"""Cache of a layer with a window: the last tokens only, in memory that does not grow with the text."""

import copy
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from caramba.cache.layer import LayerCache
from caramba.cache.tensor import DTYPES, refuse_gradients
from caramba.config.kvcache import KVCacheKind, Streams
from caramba.config.memory_bank import SPARE_TOKENS
from caramba.errors import ConfigError


class WindowLayerKVCache(LayerCache):
    """Streams of the last `window` tokens, and of 17 to 34 before them.

    Its size does not depend on the length of the text, and any number of tokens fits. Tokens are in order: once the
    memory is full, `window` + SPARE_TOKENS of them move to its front. A rollback may take back SPARE_TOKENS tokens, or
    the last forward.

    Attributes:
        n_stored: tokens stored, the last of `n_tokens`.
    """

    is_for_host = True
    cuts_anywhere = False
    spare = 2 * SPARE_TOKENS

    def __init__(
        self,
        streams: Streams,
        window: int,
        *,
        batch_size: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.names = tuple(name for name, _, _ in streams)
        self.streams, self.kind, self.window = streams, kind, window
        self._names, self._tensors = set(self.names), {}
        self._n_tokens, self.n_stored = 0, 0
        self._before: tuple[int, int, dict[str, Tensor]] | None = None
        with torch.inference_mode(False):
            self._buffers = {
                name: torch.zeros((batch_size, heads, window + self.spare, width), dtype=DTYPES[kind], device=device)
                for name, heads, width in streams
            }

    @property
    def n_tokens(self) -> int:
        """Tokens seen; the last `n_stored` of them are stored."""
        return self._n_tokens

    @property
    def capacity(self) -> int:
        """Tokens per sequence that fit at a time."""
        return self.window + self.spare

    @property
    def batch_size(self) -> int:
        return self._buffers[self.names[0]].shape[0]

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the tokens that are stored, [B, K, n_stored, D] per stream, in the storage dtype."""
        return {name: self._buffers[name][:, :, : self.n_stored] for name in self.names}

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store the next tokens of every stream; return those stored before and these, the last ones being the new.

        Shape: in [B, K, T, D] per stream, out [B, K, S, D] with S of at least min(`n_tokens`, `window` + T - 1), in the
        storage dtype.
        """
        self.check_streams(streams)
        for x in streams.values():
            refuse_gradients(x)
        n_new = streams[self.names[0]].shape[2]
        if n_new > SPARE_TOKENS:
            self.keep_before()
            dtype = DTYPES[self.kind]
            joined = {name: torch.cat((old, streams[name].to(dtype)), dim=2) for name, old in self.read().items()}
            self.n_stored = min(self.n_stored + n_new, self.window + SPARE_TOKENS)
            for name, x in joined.items():
                self._buffers[name][:, :, : self.n_stored] = x[:, :, -self.n_stored :]
            self._n_tokens += n_new
            return joined
        self._before = None
        if self.n_stored + n_new > self.capacity:
            kept = self.window + SPARE_TOKENS
            for name in self.names:
                x = self._buffers[name]
                x[:, :, :kept] = x[:, :, self.n_stored - kept : self.n_stored].clone()
            self.n_stored = kept
        for name in self.names:
            self._buffers[name][:, :, self.n_stored : self.n_stored + n_new] = streams[name]
        self.n_stored += n_new
        self._n_tokens += n_new
        return self.read()

    def keep_before(self) -> None:
        """Copy what is stored: a forward that fails is rolled back, further than the spare tokens reach."""
        copies = {name: x.clone() for name, x in self._buffers.items()}
        self._before = self._n_tokens, self.n_stored, copies

    def truncate(self, n_tokens: int) -> None:
        """Forget every token from `n_tokens` on.

        Raises:
            ConfigError: further back than SPARE_TOKENS, and than the last forward.
        """
        if self._before is not None and n_tokens <= self._before[0]:
            self._n_tokens, self.n_stored, copies = self._before
            self._before = None
            for name, x in copies.items():
                self._buffers[name].copy_(x)
        n_removed = self._n_tokens - n_tokens
        if n_tokens == 0:
            self._n_tokens = self.n_stored = 0
        elif self.n_stored == self._n_tokens or n_removed <= self.n_stored - self.window:
            self.n_stored -= n_removed
            self._n_tokens = n_tokens
        else:
            raise ConfigError(
                f"{type(self).__name__}: cannot roll {self._n_tokens} tokens back to {n_tokens}, at most "
                f"{SPARE_TOKENS} are kept besides the window; start the sequence again"
            )

    @property
    def allocated_bytes(self) -> int:
        return sum(x.nbytes for x in self._buffers.values())

    @property
    def used_bytes(self) -> int:
        return self.first_bytes

    @property
    def first_bytes(self) -> int:
        """Bytes of the state, a constant: no token adds any."""
        return self.allocated_bytes

    @property
    def memory(self) -> list[Tensor]:
        return list(self._buffers.values())

    def extend(self, max_tokens: int) -> None:
        """Do nothing: any number of tokens fits."""

    def select(self, rows: Tensor) -> None:
        self._before = None
        self._buffers = {name: x[rows.to(x.device)] for name, x in self._buffers.items()}

    def row(self, index: int, n_rows: int = 1) -> Self:
        alone = copy.copy(self)
        alone._before = None
        alone._buffers = {name: x[index : index + n_rows] for name, x in self._buffers.items()}
        return alone

    def clone(self) -> Self:
        copied = copy.copy(self)
        copied._before = None
        copied._buffers = {name: x.clone() for name, x in self._buffers.items()}
        return copied

    def state_dict(self) -> dict[str, Tensor]:
        counts = torch.tensor([self._n_tokens, self.n_stored])
        return {"counts": counts, **{name: x.clone() for name, x in self._buffers.items()}}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        n_tokens, n_stored = self._counts(state)
        self._n_tokens, self.n_stored, self._before = n_tokens, n_stored, None
        for name, x in self._buffers.items():
            x.copy_(state[name])

    def tokens_of(self, state: Mapping[str, Tensor]) -> int:
        return self._counts(state)[0]

    def _counts(self, state: Mapping[str, Tensor]) -> tuple[int, int]:
        expected = {name: (tuple(x.shape), x.dtype) for name, x in self._buffers.items()}
        expected["counts"] = ((2,), torch.int64)
        got = {name: (tuple(x.shape), x.dtype) for name, x in state.items()}
        for name in sorted({*expected, *got}):
            if got.get(name) != expected.get(name):
                raise ConfigError(
                    f"{type(self).__name__}: the state has {name} as {got.get(name)}, expected {expected.get(name)}; "
                    "load it into a cache of the model, slots, format and batch that it was saved from"
                )
        n_tokens, n_stored = (int(n) for n in state["counts"])
        if not 0 <= n_stored <= min(n_tokens, self.capacity):
            raise ConfigError(
                f"{type(self).__name__}: the state stores {n_stored} of {n_tokens} tokens, expected at most "
                f"{self.capacity}; the state is damaged, make it again"
            )
        return n_tokens, n_stored
