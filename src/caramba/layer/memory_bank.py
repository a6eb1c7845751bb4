"""Attention with long-term memory: a window of tokens, and slots that hold what has left it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.cache.memory_bank import MemoryLayerKVCache, RingStep
from caramba.cache.tensor import refuse_gradients
from caramba.config.kvcache import KVCacheKind
from caramba.config.memory_bank import LONGEST_CHUNK, MemoryBankLayerConfig
from caramba.errors import ConfigError
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents, StoredDocuments
from caramba.layer.projection import StandardProjection, split_heads
from caramba.layer.rope import rotate
from caramba.layer.write_rate import hold_rate
from caramba.ops.backend import upcast
from caramba.ops.memory_bank import (
    LOWEST,
    MemoryState,
    memory_bank,
    memory_bank_step,
    slot_reads,
    write_slots,
    write_slots_,
)

GATE_STD = 0.5
MAX_BIAS = 4.0
CLOSED_BIAS = 200.0
"""Bias of a gate that writes exactly nothing in 32 bits, so that its slot stays empty and masked."""


@dataclass
class SlotUse:
    """What queries read from a layer's slots while it is recorded: probability mass per slot [K, M], writes per slot
    [K, M], and the numbers of queries per key/value head and of written tokens."""

    reads: Tensor
    writes: Tensor
    n_queries: int = 0
    n_written: int = 0


class MemoryBankLayer(AttentionLayer):
    """Causal attention to the last `local_window` tokens and to memory slots, in one softmax.

    A token is written to its key/value head's slots when it leaves the window: K_m = a_m K_m + (1 - a_m) k and V_m
    alike, with a = sigmoid(slot_gate rms_norm([k; v]) + slot_gate_bias)^(1/tau). Gates read the key before RoPE and the
    value, so that a cache stores nothing else per token. Slots are scored without RoPE unless `memory_rope` is set. A
    slot that nothing was written to is masked. a_m is at least exp(-4) = 0.018, so that chunks of tokens are products
    of matrices in float32.

    The state belongs to a sequence: a forward without a context, and each document of a packed row, starts empty. Each
    of its first `memory_first_tokens` tokens has a slot of its own that takes no other.

    `memory_read: gated` gives window and slots a softmax each, mixed by sigmoid(read_gate) of every head. With
    `use_adaptive_compression` slots take a share sigmoid(write_gate [k; v] + write_gate_bias) of (1 - a) k and keep the
    rest of what they hold; a penalty draws the mean share to `memory_write_rate`.

    With `memory_slot_bias` slot_bias is added to the scores of the slots.

    Shape: x [B, T, M] to [B, T, M]; slot_gate [K, slots, Dqk + Dv], slot_gate_bias and slot_bias [K * slots], read_gate
    [H], write_gate [K, Dqk + Dv], write_gate_bias [K].

    Reference: Zhang et al., 2024, arXiv:2409.07146 (gated slots); Xiao et al., 2023, arXiv:2309.17453 (first tokens as
    attention sinks).
    """

    config: MemoryBankLayerConfig
    projection: StandardProjection

    def __init__(self, config: MemoryBankLayerConfig) -> None:
        super().__init__(config)
        kv_heads, slots = self.dims.n_kv_heads, config.slots
        self.slot_gate = nn.Parameter(torch.empty(kv_heads, slots, self.dims.qk + self.dims.v))
        self.slot_gate_bias = nn.Parameter(torch.empty(kv_heads * slots))
        if config.memory_slot_bias is not None:
            self.slot_bias = nn.Parameter(torch.empty(kv_heads * slots))
        if config.memory_read == "gated":
            self.read_gate = nn.Parameter(torch.empty(self.dims.n_heads))
        if config.use_adaptive_compression:
            self.write_gate = nn.Parameter(torch.empty(kv_heads, self.dims.qk + self.dims.v))
            self.write_gate_bias = nn.Parameter(torch.empty(kv_heads))
        self.use: SlotUse | None = None

    def reset_parameters(self) -> None:
        """Draw the gates; biases spread the slots from short memory to long."""
        super().reset_parameters()
        nn.init.normal_(self.slot_gate, std=GATE_STD)
        spread = torch.linspace(0.0, MAX_BIAS, self.config.slots).repeat(self.dims.n_kv_heads)
        with torch.no_grad():
            self.slot_gate_bias.copy_(spread)
            if self.config.memory_slot_bias is not None:
                self.slot_bias.fill_(self.config.memory_slot_bias)
                self.slot_bias.view(self.dims.n_kv_heads, -1)[:, : self.config.memory_first_tokens] = 0
        if self.config.memory_read == "gated":
            nn.init.zeros_(self.read_gate)
        if self.config.use_adaptive_compression:
            nn.init.zeros_(self.write_gate)
            nn.init.constant_(self.write_gate_bias, math.log(self.config.write_rate / (1 - self.config.write_rate)))

    def new_cache(
        self,
        batch_size: int,
        max_tokens: int,
        kind: KVCacheKind = KVCacheKind.FP32,
        device: torch.device | str = "cpu",
        static: bool = False,
        **format: object,
    ) -> MemoryLayerKVCache:
        """Return an empty cache; the arguments are those of `new_layer_cache`, and its size depends on none but batch
        and kind."""
        window, slots = self.config.local_window, self.config.slots
        assert window is not None
        return MemoryLayerKVCache(self.dims.streams, window, slots, batch_size=batch_size, kind=kind, device=device)

    def gates(self, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return log a and 1 - a, each [B, K, S, slots] in at least float32.

        Slots of first tokens have a = 1, and take the whole of their token alone.

        Shape: k before RoPE and v, [B, K, S, ·]; positions of the tokens, integers [S] or [B, 1, S].
        """
        decay, write = self._gates(k, v)
        n_first = self.config.memory_first_tokens
        if not n_first:
            return decay, write
        slots = torch.arange(self.config.slots, device=k.device)
        is_first = slots < n_first
        taken = (positions[..., None] == slots).to(write.dtype)
        return decay.masked_fill(is_first, 0), torch.where(is_first, taken, write)

    def _gates(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(k.device.type, enabled=False):
            kv = torch.cat((upcast(k), upcast(v)), dim=-1)
            kv = F.rms_norm(kv, kv.shape[-1:])  # gates that do not depend on the scale of the projections
            bias = upcast(self.slot_gate_bias).view(self.dims.n_kv_heads, 1, -1)
            # The product of bfloat16 stays in it, as those of the op do.
            dtype = k.dtype if k.dtype == torch.bfloat16 else kv.dtype
            gate = upcast(kv.to(dtype) @ self.slot_gate.to(dtype).mT) + bias
            decay = (F.logsigmoid(gate) / self.config.memory_tau).clamp_min(LOWEST)
            write = -torch.expm1(decay)
            if not self.config.use_adaptive_compression:
                return decay, write
            taken = torch.einsum("bksd,kd->bks", kv, upcast(self.write_gate))
            taken = (taken + upcast(self.write_gate_bias)[:, None]).sigmoid()
            write = write * hold_rate(taken, self.config.write_rate)[..., None]
            return torch.log1p(-write), write

    def read(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        """Return the concatenated head outputs. Shape: [B, T, M] -> [B, T, H*Dv]."""
        if isinstance(ctx, StoredDocuments):
            raise ConfigError(
                f"MemoryBankLayer: got a {type(ctx).__name__}, and the host reads its cache; use the context itself"
            )
        projection = self.projection
        q, k, v = projection.linears(x, None)
        q = projection.q_norm(split_heads(q, self.dims.n_heads))
        k = projection.k_norm(split_heads(k, self.dims.n_kv_heads))
        v = split_heads(v, self.dims.n_kv_heads)
        k = k.to(v.dtype)
        if isinstance(ctx, DeviceContext):
            self.check_step(ctx, x.shape[1])
            return self._step(q, k, v, ctx).transpose(1, 2).flatten(2)
        if ctx is None or isinstance(ctx, Documents):
            positions = 0 if ctx is None else ctx.positions
            first = None if ctx is None else ctx.first
            heads, _ = self._attend(q, k, v, positions, positions, None, first)
            return heads.transpose(1, 2).flatten(2)
        cache = self._next_cache(ctx)
        n_tokens, earlier = x.shape[1], cache.read_stored()
        k, v = (torch.cat((old.to(new.dtype), new), dim=2) for old, new in zip(earlier, (k, v), strict=True))
        state = cache.state
        heads, gates = self._attend(q, k, v, ctx.position, ctx.position - cache.n_stored, state, None)
        n = cache.excess(n_tokens)
        if n:
            state = write_slots(
                state,
                self._slot_keys(k[:, :, :n], ctx.position - cache.n_stored),
                v[:, :, :n],
                *(g[:, :, :n] for g in gates),
            )
        cache.put(k[:, :, n:], v[:, :, n:], state, n_tokens)
        return heads.transpose(1, 2).flatten(2)

    def _next_cache(self, ctx: Context | DeviceContext) -> MemoryLayerKVCache:
        cache = ctx.next_cache()
        if not isinstance(cache, MemoryLayerKVCache):
            raise ConfigError(
                f"MemoryBankLayer: got a {type(cache).__name__}; make the context with this model's new_context()"
            )
        return cache

    def _step(self, q: Tensor, k: Tensor, v: Tensor, ctx: DeviceContext) -> Tensor:
        """Return head outputs [B, H, 1, Dv] of one token, queries and keys before RoPE; write the cache in place.

        All depends on tensors of fixed shapes and addresses, so that it can be captured.
        """
        refuse_gradients(k)
        cache, dtype, rope = self._next_cache(ctx), v.dtype, self.projection.rope
        size = cache.ring_size
        step = ctx.rings.get(size)
        if step is None:
            step = RingStep.of(cache, ctx.device_lengths[:1], ctx.n_dropped[size])
            ctx.rings[size] = step
        left_k, left_v = (x.index_select(2, step.left).to(dtype) for x in cache.ring)
        for into, x in zip(cache.ring, (k, v), strict=True):
            into.index_copy_(2, step.place, x.to(into.dtype))
        ring_k, ring_v = (x.to(dtype) for x in cache.ring)
        places = step.positions[0, size:-1]
        decay, write = (gate.masked_fill(step.is_written, 0) for gate in self.gates(left_k, left_v, places))
        wide = torch.promote_types(dtype, torch.float32)
        near_q = slot_q = self.projection.scale_queries(q, wide)
        slot_k = left_k
        if rope is not None:
            key = rope.key, size
            if key not in ctx.angles:
                cos, sin = rope(step.positions, step.positions.shape[1], k.device)
                ctx.angles[key] = cos[0], sin[0]
            cos, sin = ctx.angles[key]
            ring_k = rotate(ring_k, cos[:, :size], sin[:, :size])
            near_q = rotate(near_q, cos[:, -1:], sin[:, -1:])
            if self.config.memory_rope:
                slot_q, slot_k = near_q, rotate(left_k, cos[:, size:-1], sin[:, size:-1], dtype)
        left = slot_k, left_v, decay, write
        write_slots_(cache.state, *(x[:, :, :1] for x in left))
        seen = write_slots(cache.state, *(x[:, :, 1:] for x in left))
        share = upcast(self.read_gate).sigmoid() if self.config.memory_read == "gated" else None
        return memory_bank_step(near_q, ring_k, ring_v, slot_q, seen, step.is_hidden, share, self._score_bias())

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offset: int | Tensor,
        k_offset: int | Tensor,
        state: MemoryState | None,
        first: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return head outputs [B, H, T, Dv] and the tokens' gates, of queries and keys before RoPE."""
        dtype, window = v.dtype, self.config.local_window
        assert window is not None
        # Tokens of the last window are written by no query here, so they need no gates.
        n_written = max(k.shape[2] - window, 0)
        if isinstance(k_offset, Tensor):
            places = k_offset[:, None, :n_written]
        else:
            places = torch.arange(k_offset, k_offset + n_written, device=k.device)
        log_keep, write = (
            F.pad(gate, (0, 0, 0, k.shape[2] - n_written))
            for gate in self.gates(k[:, :, :n_written], v[:, :, :n_written], places)
        )
        gates = log_keep, write
        slot_q, slot_k = self.projection.scale_queries(q, dtype), k
        rotated_q, rotated_k = slot_q, slot_k
        if self.projection.rope is not None:
            rotated_q = self.projection.scale_queries(self._rotate(q, q_offset), dtype)
            rotated_k = self._rotate(k, k_offset).to(dtype)
        if self.config.memory_rope:
            slot_q, slot_k = rotated_q, rotated_k
        given = (rotated_q, rotated_k, v, slot_q, slot_k, *gates)
        options: dict[str, Any] = {"window": window, "state": state, "first": first}
        options |= {"chunk": self.config.q_chunk or LONGEST_CHUNK, "slot_bias": self._score_bias()}
        if self.config.memory_read == "gated":
            options["share"] = upcast(self.read_gate).sigmoid()
        heads, _ = memory_bank(*given, **options, bptt_chunks=self.config.memory_bptt_chunks or 0)
        if self.use is not None:
            reads = slot_reads(*given, **options)
            self.use.reads += reads.unflatten(0, (k.shape[1], -1)).sum(1)
            self.use.writes += write[:, :, :n_written].sum((0, 2))
            self.use.n_queries += q.shape[0] * q.shape[1] // k.shape[1] * q.shape[2]
            self.use.n_written += k.shape[0] * n_written
        return heads, gates

    def _score_bias(self) -> Tensor | None:
        """Return what is added to the scores of the slots, [K, slots] in at least float32."""
        if self.config.memory_slot_bias is None:
            return None
        return upcast(self.slot_bias).view(self.dims.n_kv_heads, -1)

    def start_use(self) -> None:
        """Record from now on what is read from the slots and written to them; `use = None` ends it."""
        shape = (self.dims.n_kv_heads, self.config.slots)
        device = self.slot_gate.device
        self.use = SlotUse(torch.zeros(shape, device=device), torch.zeros(shape, device=device))

    def _slot_keys(self, k: Tensor, offset: int) -> Tensor:
        return self._rotate(k, offset).to(k.dtype) if self.config.memory_rope else k

    def _rotate(self, x: Tensor, offset: int | Tensor) -> Tensor:
        rope = self.projection.rope
        return x if rope is None else rotate(x, *rope(offset, x.shape[2], x.device))
