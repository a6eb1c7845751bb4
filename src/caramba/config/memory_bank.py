"""Schema of attention with long-term memory: a window of tokens and slots that hold what has left it."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from caramba.config.attention import AttentionLayerConfig
from caramba.config.attention_dims import AttentionMode
from caramba.config.cost import AttentionWork, Cost, Width, expect_width, layer_cost
from caramba.config.layer_base import Dimension, Shapes
from caramba.config.source import is_mapping

SPARE_TOKENS = 17
"""Tokens that a cache keeps besides its window, which a rollback may take back: 16 drafts and the token before."""
WRITE_RATE = 0.25
LONGEST_CHUNK = 32
"""Queries that read the slots at once, at most."""


class MemoryBankLayerConfig(AttentionLayerConfig):
    """Attention to the last `local_window` tokens and to `memory_slots` slots per key/value head.

    A token is written to the slots when it leaves the window. Its gates depend on its key before RoPE and its value:
    slot m keeps a share a_m = sigmoid(gate_m)^(1/memory_tau) of what it holds and takes 1 - a_m of the token. One
    softmax covers window and slots. The state has a constant size per sequence and is empty at the start of each.
    The first `memory_first_tokens` slots hold one token each, the first ones of the sequence, and never change.

    `memory_compression_ratio` is max_sequence_length / (local_window + memory_slots): give the slots or the ratio.

    Reference: Zhang et al., 2024, arXiv:2409.07146 (gated slots).
    """

    target = "caramba.layer.memory_bank:MemoryBankLayer"

    type: Literal["MemoryBankLayer"] = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default="MemoryBankLayer", description="name of the class of this node"
    )
    memory_slots: Dimension | None = Field(
        default=None, description="slots per key/value head; unset: from memory_compression_ratio"
    )
    memory_compression_ratio: PositiveFloat | None = Field(
        default=None,
        description="max_sequence_length / (local_window + memory_slots); needs max_sequence_length",
    )
    max_sequence_length: Dimension | None = Field(
        default=None, description="longest sequence that memory_compression_ratio is meant for, in tokens"
    )
    memory_rope: bool = Field(
        default=False, description="whether slots hold keys after RoPE; false: keys without positions"
    )
    memory_tau: PositiveFloat = Field(
        default=8.0, description="temperature of the slot gates; larger values forget more slowly"
    )

    memory_first_tokens: NonNegativeInt = Field(
        default=0,
        description="first tokens of a sequence, or document, that a slot each holds as they are: attention sinks",
    )
    memory_slot_bias: float | None = Field(
        default=None,
        description="initial bias of the scores of slots but those of first tokens, trained; negative: slots are read "
        "little at first; unset: no bias",
    )
    memory_read: Literal["joint", "gated"] = Field(
        default="joint",
        description="one softmax over window and slots, or one each, mixed by a trained share of every head",
    )
    use_adaptive_compression: bool = Field(
        default=False,
        description="whether a trained gate of each token scales what slots take of it; false: they take all tokens",
    )
    memory_write_rate: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None,
        description="mean of use_adaptive_compression's gates that training holds, 0 to 1; unset: 0.25",
    )
    memory_bptt_chunks: Dimension | None = Field(
        default=None,
        description="chunks of q_chunk queries whose reads train the writes of one another; unset: all",
    )

    @model_validator(mode="before")
    @classmethod
    def _attention_block_size(cls, data: Any) -> Any:
        """Take `attention_block_size` as another name of q_chunk."""
        if not is_mapping(data) or "attention_block_size" not in data:
            return data
        given: dict[str, Any] = dict(data)
        size = given.pop("attention_block_size")
        if given.get("q_chunk", size) != size:
            raise ValueError(f"attention_block_size={size} and q_chunk={given['q_chunk']} name the same key; keep one")
        return given | {"q_chunk": size}

    @model_validator(mode="after")
    def _memory_rules(self) -> MemoryBankLayerConfig:
        if self.local_window is None:
            raise ValueError("a MemoryBankLayer needs local_window, the tokens before they go to the slots")
        refused = {
            "mode": self.mode if self.mode not in (AttentionMode.STANDARD, AttentionMode.GQA) else None,
            "null_attn": self.null_attn,
            "dropout": self.dropout,
            "cache_format": self.cache_format,
        }
        for name, value in refused.items():
            if value:
                raise ValueError(
                    f"{name}={value} is not built for a MemoryBankLayer; remove it (mode: standard or gqa)"
                )
        if self.rope_scaling is not None and self.rope_scaling.type == "dynamic":
            raise ValueError(
                "rope_scaling type=dynamic depends on the length, which a MemoryBankLayer does not keep; use yarn"
            )
        if self.memory_write_rate is not None and not self.use_adaptive_compression:
            raise ValueError(
                f"memory_write_rate={self.memory_write_rate:g} is of use_adaptive_compression, which is false; set it, "
                "or remove the rate"
            )
        self._slots_of_ratio(self.local_window)
        if self.memory_first_tokens >= self.slots:
            raise ValueError(
                f"memory_first_tokens={self.memory_first_tokens} takes all of {self.slots} slots; use at most "
                f"{self.slots - 1}, or more slots"
            )
        return self

    def _slots_of_ratio(self, window: int) -> None:
        ratio, longest = self.memory_compression_ratio, self.max_sequence_length
        if ratio is None:
            if self.memory_slots is None:
                raise ValueError(
                    "a MemoryBankLayer needs memory_slots, or memory_compression_ratio and max_sequence_length"
                )
            return
        if longest is None:
            raise ValueError("memory_compression_ratio needs max_sequence_length, the tokens that it divides")
        slots = round(longest / ratio) - window
        if slots < 1:
            raise ValueError(
                f"memory_compression_ratio={ratio:g} of {longest} tokens leaves {slots + window} for window and slots, "
                f"and local_window={window} takes them; use a smaller ratio or window"
            )
        if self.memory_slots not in (None, slots):
            raise ValueError(
                f"memory_slots={self.memory_slots} contradicts memory_compression_ratio={ratio:g}, which gives {slots} "
                f"with local_window={window} and max_sequence_length={longest}; remove one"
            )

    @property
    def write_rate(self) -> float:
        """Mean of write gates that training holds."""
        return WRITE_RATE if self.memory_write_rate is None else self.memory_write_rate

    @property
    def slots(self) -> int:
        """Slots per key/value head, given or from the ratio."""
        if self.memory_slots is not None:
            return self.memory_slots
        assert self.max_sequence_length is not None
        assert self.memory_compression_ratio is not None
        assert self.local_window is not None
        return round(self.max_sequence_length / self.memory_compression_ratio) - self.local_window

    def parameter_shapes(self) -> Shapes:
        """Return the weights of attention and the gates of the slots."""
        dims = self.dims()
        found: Shapes = super().parameter_shapes() | {
            "slot_gate": (dims.n_kv_heads, self.slots, dims.qk + dims.v),
            "slot_gate_bias": (dims.n_kv_heads * self.slots,),
        }
        if self.memory_slot_bias is not None:
            found |= {"slot_bias": (dims.n_kv_heads * self.slots,)}
        if self.memory_read == "gated":
            found |= {"read_gate": (dims.n_heads,)}
        if self.use_adaptive_compression:
            found |= {
                "write_gate": (dims.n_kv_heads, dims.qk + dims.v),
                "write_gate_bias": (dims.n_kv_heads,),
            }
        return found

    def infer(self, width: Width) -> Cost:
        """Check the width and count: a query reads its window and every slot, a token is written to every slot once.

        The cache is `state_bytes` per sequence, whatever its length: no bytes per token.
        """
        expect_width(width, self.d_model, "d_model")
        dims, slots = self.dims(), self.slots
        assert self.local_window is not None
        features = dims.qk + dims.v
        work = AttentionWork(dims.n_heads * features, self.local_window, null=slots)
        # By query: scores, probabilities and their products with the decays; by token: gates and states of its chunk.
        queries = dims.n_heads * (6 * slots + 2 * LONGEST_CHUNK + 2 * features)
        states = 4 * slots * features // LONGEST_CHUNK
        saved = self.d_model + queries + dims.n_kv_heads * (9 * slots + 3 * features + states)
        cost = layer_cost(
            f"{self.mode}, {dims.n_heads}:{dims.n_kv_heads} heads x {dims.qk}, window {self.local_window} + {slots}",
            self.type,
            width,
            width,
            self.parameter_shapes(),
            saved,
            work,
        )
        return replace(
            cost,
            matmul_params_used=cost.matmul_params_used + dims.n_kv_heads * slots * features,
            kv_first=((self.local_window + SPARE_TOKENS, dims.streams),),
            state_bytes=dims.n_kv_heads * slots * (features + 1) * 4,
        )
