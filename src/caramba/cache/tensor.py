"""Storage of one cached stream: a [B, K, capacity, D] tensor that fills along its third dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.config.kvcache import EXACT_KINDS, KVCacheKind
from caramba.errors import ConfigError

DTYPES = {KVCacheKind.FP32: torch.float32, KVCacheKind.FP16: torch.float16, KVCacheKind.BF16: torch.bfloat16}
GROWTH = 2
FIRST_CAPACITY = 16


@dataclass(frozen=True)
class KVCacheTensorConfig:
    """Format of one cached tensor."""

    kind: KVCacheKind = KVCacheKind.FP32

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the storage.

        Raises:
            ConfigError: the kind is quantised, or stands for a choice that has not been made.
        """
        if self.kind not in DTYPES:
            known = ", ".join(EXACT_KINDS)
            raise ConfigError(
                f"KV cache: kind={self.kind} comes with the kernel and cache work; use one of: {known}"
            )
        return DTYPES[self.kind]


class KVCacheTensor:
    """One cached stream of one attention application, stored as [B, K, capacity, D].

    `static` allocates `max_tokens` at once. Otherwise nothing is allocated before the first append, and a
    full buffer is replaced by one of at least twice its capacity, never above `max_tokens`. Values are stored
    in the config's format, so fp16 and bf16 round what is appended.

    A cache holds no graph: appending a tensor that autograd follows is an error, because an in-place write
    would cut its gradient without a word.
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
            raise ConfigError(
                f"KV cache: got batch_size={batch_size}, max_tokens={max_tokens}; both are at least 1"
            )
        self.config = config
        self.max_tokens = max_tokens
        self.n_tokens = 0
        self._buffer = self._allocate(
            batch_size, n_heads, max_tokens if static else 0, width, torch.device(device)
        )

    @property
    def capacity(self) -> int:
        """Tokens per sequence that the allocated buffer holds."""
        return self._buffer.shape[2]

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the allocated buffer, the whole batch together."""
        return self._buffer.untyped_storage().nbytes()

    @property
    def used_bytes(self) -> int:
        """Bytes of the part of the buffer that holds tokens, the whole batch together."""
        return self.read().numel() * self._buffer.element_size()

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token of one sequence takes."""
        _, n_heads, _, width = self._buffer.shape
        return n_heads * width * self._buffer.element_size()

    def append(self, values: Tensor) -> None:
        """Add the next tokens behind those already stored.

        Args:
            values: [B, K, T, D], any floating dtype.

        Raises:
            ConfigError: a shape or device that does not fit, more tokens than `max_tokens`, or tracked
            gradients.
        """
        self._check(values)
        end = self.n_tokens + values.shape[2]
        if end > self.capacity:
            self._grow(end)
        self._buffer[:, :, self.n_tokens : end].copy_(values)
        self.n_tokens = end

    def read(self) -> Tensor:
        """Return a view of the stored tokens, [B, K, S, D], in the storage dtype."""
        return self._buffer[:, :, : self.n_tokens]

    def truncate(self, n_tokens: int) -> None:
        """Forget every token from `n_tokens` on. The allocation stays, ready to be filled again."""
        if not 0 <= n_tokens <= self.n_tokens:
            raise ConfigError(
                f"KV cache: truncate to {n_tokens} tokens, expected 0 to {self.n_tokens} (those stored)"
            )
        self.n_tokens = n_tokens

    def extend(self, max_tokens: int) -> None:
        """Allow up to `max_tokens` tokens, if that is more than before. Memory is taken when they come."""
        self.max_tokens = max(self.max_tokens, max_tokens)

    def _check(self, values: Tensor) -> None:
        batch, n_heads, _, width = self._buffer.shape
        if values.dim() != 4 or (values.shape[0], values.shape[1], values.shape[3]) != (
            batch,
            n_heads,
            width,
        ):
            raise ConfigError(
                f"KV cache: got shape {tuple(values.shape)}, expected [{batch}, {n_heads}, T, {width}]; "
                "make the context with this model's new_context() and the same batch size"
            )
        if values.device != self._buffer.device:
            raise ConfigError(
                f"KV cache: got a tensor on {values.device}, the cache is on {self._buffer.device}; "
                "make the context after the model is moved"
            )
        if values.requires_grad and torch.is_grad_enabled():
            raise ConfigError(
                "KV cache: cannot store a tensor that autograd follows; "
                "run a forward with a context under torch.no_grad() or torch.inference_mode()"
            )
        end = self.n_tokens + values.shape[2]
        if end > self.max_tokens:
            raise ConfigError(
                f"KV cache: {end} tokens do not fit max_tokens={self.max_tokens}; "
                "make the context with a larger max_tokens, or truncate it"
            )

    def _grow(self, needed: int) -> None:
        old = self._buffer
        batch, n_heads, capacity, width = old.shape
        capacity = min(self.max_tokens, max(needed, GROWTH * capacity, FIRST_CAPACITY))
        self._buffer = self._allocate(batch, n_heads, capacity, width, old.device)
        self._buffer[:, :, : self.n_tokens].copy_(old[:, :, : self.n_tokens])

    def _allocate(self, batch: int, n_heads: int, capacity: int, width: int, device: torch.device) -> Tensor:
        # A buffer made inside inference_mode could not be written to outside of it later.
        with torch.inference_mode(False):
            return torch.empty(batch, n_heads, capacity, width, dtype=self.config.dtype, device=device)
