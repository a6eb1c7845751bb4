"""Cache of a layer with memory slots: the last tokens, and the slots that hold what came before them."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.cache.tensor import refuse_gradients
from caramba.cache.window import WindowLayerKVCache
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind, Streams
from caramba.config.memory_bank import SPARE_TOKENS
from caramba.errors import ConfigError
from caramba.ops.memory_bank import MemoryState


class MemoryLayerKVCache(WindowLayerKVCache):
    """Keys (before RoPE) and values of the last `window` + SPARE_TOKENS tokens, and slots in float32.

    Its size does not depend on the length. A token is written to the slots once SPARE_TOKENS more have left the window,
    so that as many can be rolled back; until then each forward writes it again.
    """

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

    def read_stored(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the last tokens, [B, K, n_stored, ·] in the storage dtype."""
        k, v = self.read().values()
        return k, v

    def excess(self, n_tokens: int) -> int:
        """Return how many of the stored tokens and `n_tokens` new ones go to the slots."""
        return max(self.n_stored + n_tokens - self.capacity, 0)

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
        self._buffers["k"][:, :, : self.n_stored] = k
        self._buffers["v"][:, :, : self.n_stored] = v
        for into, x in zip(self.state, state, strict=True):
            into.copy_(x)
        self._n_tokens += n_tokens

    def truncate(self, n_tokens: int) -> None:
        super().truncate(n_tokens)
        if n_tokens == 0:
            for into in self.state:
                into.zero_()
