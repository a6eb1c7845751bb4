"""Cache of a layer with memory slots: the last tokens, and the slots that hold what came before them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from caramba.cache.layer import LayerCache
from caramba.config.kvcache import EXACT_KINDS, KVCacheKind, Streams
from caramba.config.memory_bank import SPARE_TOKENS
from caramba.errors import ConfigError
from caramba.ops.memory_bank import MemoryState

_DTYPES = {
    KVCacheKind.FP32: torch.float32,
    KVCacheKind.FP16: torch.float16,
    KVCacheKind.BF16: torch.bfloat16,
}


class MemoryLayerKVCache(LayerCache):
    """Keys (before RoPE) and values of the last `window` + SPARE_TOKENS tokens, and slots in float32.

    Its size does not depend on the length. A token is written to the slots once SPARE_TOKENS more have left the window,
    so that as many can be rolled back; until then each forward writes it again.

    Attributes:
        n_stored: tokens stored, the last of `n_tokens`.
    """

    names = ("k", "v")
    is_for_host = True
    cuts_anywhere = False

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
        self.streams, self.kind, self.window = streams, kind, window
        self._tensors, self._n_tokens, self.n_stored = {}, 0, 0
        self._before: tuple[int, int, dict[str, Tensor]] | None = None
        (_, heads, width), (_, _, v_width) = streams
        ring, dtype = (batch_size, heads, window + SPARE_TOKENS), _DTYPES[kind]
        with torch.inference_mode(False):
            self._buffers = {
                "k": torch.zeros((*ring, width), dtype=dtype, device=device),
                "v": torch.zeros((*ring, v_width), dtype=dtype, device=device),
                "keys": torch.zeros((batch_size, heads, slots, width), device=device),
                "values": torch.zeros((batch_size, heads, slots, v_width), device=device),
                "mass": torch.zeros((batch_size, heads, slots), device=device),
            }

    @property
    def n_tokens(self) -> int:
        """Tokens seen; the last `n_stored` of them are stored."""
        return self._n_tokens

    @property
    def batch_size(self) -> int:
        return self._buffers["k"].shape[0]

    @property
    def state(self) -> MemoryState:
        """The slots, without the tokens that `read_stored` returns; a view of the cache's memory."""
        return MemoryState(*(self._buffers[name] for name in MemoryState._fields))

    def read_stored(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of the last tokens, [B, K, n_stored, ·] in the storage dtype."""
        k, v = (self._buffers[name][:, :, : self.n_stored] for name in self.names)
        return k, v

    def excess(self, n_tokens: int) -> int:
        """Return how many of the stored tokens and `n_tokens` new ones go to the slots."""
        return max(self.n_stored + n_tokens - self._buffers["k"].shape[2], 0)

    def put(self, k: Tensor, v: Tensor, state: MemoryState, n_tokens: int) -> None:
        """Replace what is stored, after `n_tokens` new tokens.

        Shape: k, v [B, K, S, ·], the last S tokens; `state` holds all before them.
        """
        if k.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                "KV cache: cannot store a tensor that autograd follows; "
                "run a forward with a context under torch.no_grad() or torch.inference_mode()"
            )
        if n_tokens > SPARE_TOKENS:
            # A forward that fails after this layer is rolled back, further than the spare tokens reach.
            copies = {name: x.clone() for name, x in self._buffers.items()}
            self._before = self._n_tokens, self.n_stored, copies
        else:
            self._before = None
        self.n_stored = k.shape[2]
        self._buffers["k"][:, :, : self.n_stored] = k
        self._buffers["v"][:, :, : self.n_stored] = v
        for into, x in zip(self.state, state, strict=True):
            into.copy_(x)
        self._n_tokens += n_tokens

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
            for into in self.state:
                into.zero_()
        elif self.n_stored == self._n_tokens or n_removed <= self.n_stored - self.window:
            self.n_stored -= n_removed
            self._n_tokens = n_tokens
        else:
            raise ConfigError(
                f"MemoryLayerKVCache: cannot roll {self._n_tokens} tokens back to {n_tokens}, at most {SPARE_TOKENS} "
                "are kept besides the window; start the sequence again"
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
        if not 0 <= n_stored <= min(n_tokens, self._buffers["k"].shape[2]):
            raise ConfigError(
                f"{type(self).__name__}: the state stores {n_stored} of {n_tokens} tokens, expected at most "
                f"{self._buffers['k'].shape[2]}; the state is damaged, make it again"
            )
        return n_tokens, n_stored
