"""Cache of a layer with memory slots: the last tokens, and the slots that hold what came before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from caramba.cache.tensor import refuse_gradients
from caramba.cache.window import WindowLayerKVCache
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind, Streams
from caramba.config.memory_bank import SPARE_TOKENS
from caramba.errors import ConfigError
from caramba.ops.memory_bank import MemoryState


class MemoryLayerKVCache(WindowLayerKVCache):
    """Keys (before RoPE) and values of the last `window` + SPARE_TOKENS tokens in a ring, and slots in float32.

    Its size does not depend on the length. A token is written to the slots once SPARE_TOKENS more have left the window,
    so that as many can be rolled back; until then each forward writes it again.
    """

    is_for_host = False
    spare = SPARE_TOKENS

    def __init__(
        self,
        streams: Streams,
        window: int,
        slots: int,
        *,
        batch_size: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: torch.device | str = "cpu",
    ) -> None:
        if kind not in EXACT_KINDS:
            raise ConfigError(
                f"MemoryLayerKVCache: got kind={kind}, and memory slots are not quantised; use fp32, fp16 or bf16"
            )
        super().__init__(streams, window, batch_size=batch_size, kind=kind, device=device)
        (_, heads, width), (_, _, v_width) = streams
        with torch.inference_mode(False):
            self._buffers |= {
                "keys": torch.zeros((batch_size, heads, slots, width), device=device),
                "values": torch.zeros((batch_size, heads, slots, v_width), device=device),
                "mass": torch.zeros((batch_size, heads, slots), device=device),
            }

    @property
    def state(self) -> MemoryState:
        """The slots, without the tokens that `read_stored` returns; a view of the cache's memory."""
        return MemoryState(*(self._buffers[name] for name in MemoryState._fields))

    @property
    def ring(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the ring, [B, K, capacity, ·] in the storage dtype; a view of the cache's memory."""
        return self._buffers["k"], self._buffers["v"]

    @property
    def ring_size(self) -> int:
        return self.capacity

    @property
    def n_dropped(self) -> int:
        return self._n_tokens - self.n_stored

    def read(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        return {name: self._in_order(self._buffers[name])[:, :, : self.n_stored] for name in self.names}

    def read_stored(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the last tokens, [B, K, n_stored, ·] in the storage dtype."""
        k, v = self.read().values()
        return k, v

    def excess(self, n_tokens: int) -> int:
        """Return how many of the stored tokens and `n_tokens` new ones go to the slots."""
        return max(self.n_stored + n_tokens - self.capacity, 0)

    def append(self, streams: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Refuse tokens without the slots that they leave behind.

        Raises:
            ConfigError: always; `put` takes both.
        """
        raise ConfigError("MemoryLayerKVCache: got tokens alone; store them by put(), with the state of the slots")

    def put(self, k: Tensor, v: Tensor, state: MemoryState, n_tokens: int) -> None:
        """Replace what is stored, after `n_tokens` new tokens.

        Shape: k, v [B, K, S, ·], the last S tokens; `state` holds all before them.
        """
        refuse_gradients(k)
        if n_tokens > SPARE_TOKENS:
            self.keep_before()
        else:
            self._before = None
        self.n_stored = k.shape[2]
        self._n_tokens += n_tokens
        n_new = min(n_tokens, self.n_stored)
        place = (self._n_tokens - n_new) % self.capacity
        n_to_end = min(n_new, self.capacity - place)
        for into, x in zip(self.ring, (k, v), strict=True):
            new = x[:, :, self.n_stored - n_new :]
            into[:, :, place : place + n_to_end] = new[:, :, :n_to_end]
            into[:, :, : n_new - n_to_end] = new[:, :, n_to_end:]
        for into, x in zip(self.state, state, strict=True):
            into.copy_(x)

    def advance(self, n_tokens: int) -> None:
        self._before = None
        self._n_tokens += n_tokens
        self.n_stored = min(self.n_stored + n_tokens, self.capacity)

    def truncate(self, n_tokens: int) -> None:
        super().truncate(n_tokens)
        if n_tokens == 0:
            for into in self.state:
                into.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        state = super().state_dict()
        return state | {name: self._in_order(state[name]) for name in self.names}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        for x in self.ring:
            x.copy_(x.roll(self.n_dropped % self.capacity, 2))

    def _in_order(self, x: Tensor) -> Tensor:
        """Return a ring's tokens from the oldest one that is stored."""
        first = self.n_dropped % self.capacity
        return x.roll(-first, 2) if first else x


class RingStep(NamedTuple):
    """Places and positions of a step on the device, which layers of equal windows share.

    A step at position p stores its token in the place of token p - capacity, which is written to the slots. The query
    sees the `window` last tokens in the ring, and those that have left the window, p - capacity to p - window, in the
    slots.

    Attributes:
        place: where the step's token goes, int64 [1].
        left: places of tokens that have left the window, from the one at `place` on, int64 [L].
        is_written: which of them the slots already hold, or never come, bool [L, 1].
        is_hidden: which places of the ring the query does not see, the step's token stored, bool [capacity].
        positions: of the ring's tokens, of those that have left the window, and of the step's, int32 [1, capacity + L
            + 1].
    """

    place: Tensor
    left: Tensor
    is_written: Tensor
    is_hidden: Tensor
    positions: Tensor

    @classmethod
    def of(cls, cache: MemoryLayerKVCache, length: Tensor, n_dropped: Tensor) -> RingStep:
        """Return a step after `length` tokens, of which the slots hold `n_dropped`; both int32 [1]."""
        size, places = cache.capacity, torch.arange(cache.capacity, dtype=torch.int32, device=length.device)
        age = (length - places) % size
        left = length - size + places[: cache.spare + 1]
        return cls(
            place=(length % size).long(),
            left=(left % size).long(),
            is_written=(left < n_dropped)[:, None],
            is_hidden=(age >= cache.window) | (age > length),
            positions=torch.cat((length - age, left, length)).clamp(min=0)[None],
        )
