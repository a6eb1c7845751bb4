"""Schema of the training ladder: the same steps with one means of speed or memory after the other switched on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, field_validator, model_validator

from caramba.config.base import Config, Probability, Share
from caramba.config.layer_base import Positive

RowName = Literal[
    "baseline",
    "tf32",
    "bf16",
    "flash",
    "kernels",
    "fused_adamw",
    "compile",
    "fused_ce",
    "fp8",
    "bf16_weights",
    "selective",
    "full",
    "largest_batch",
]


@dataclass(frozen=True)
class LadderRow:
    """What a row adds to those before it: keys of the phase, and how it is called.

    `undone` are the keys that take it away again from a row that has it, where its default does not.
    """

    what: str
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    undone: dict[str, Any] = field(default_factory=dict[str, Any])


BASELINE: dict[str, Any] = {
    "dtype": "float32",
    "use_amp": False,
    "fused_optimizer": False,
    "cross_entropy": "dense",
}
FLOAT32 = {"dtype": "float32", "use_amp": False, "float8": "none", "stochastic_rounding": False}
RUNGS: dict[RowName, LadderRow] = {
    "baseline": LadderRow("float32, eager, nothing fused", BASELINE),
    "tf32": LadderRow("+ TF32 products", {"tf32": True}, {"tf32": False}),
    "bf16": LadderRow("+ bfloat16 autocast", {"dtype": "bfloat16", "use_amp": True}, FLOAT32),
    "flash": LadderRow("+ best SDPA backend"),
    "kernels": LadderRow("+ kernels of eager layers"),
    "fused_adamw": LadderRow("+ fused AdamW", {"fused_optimizer": True}, {"fused_optimizer": False}),
    "compile": LadderRow("+ compiled blocks", {"compile_model": True}, {"compile_model": False}),
    "fused_ce": LadderRow(
        "+ head and loss in chunks", {"cross_entropy": "chunked"}, {"cross_entropy": "dense"}
    ),
    "bf16_weights": LadderRow(
        "+ bfloat16 weights, rounded at random",
        {"dtype": "bfloat16", "use_amp": False, "stochastic_rounding": True},
        {"use_amp": True, "stochastic_rounding": False},
    ),
    "fp8": LadderRow("+ float8 products", {"float8": "rowwise"}, {"float8": "none"}),
    "selective": LadderRow("+ selective checkpointing", {"activation_checkpointing": "selective"}),
    "full": LadderRow("+ full checkpointing", {"activation_checkpointing": "full"}),
    "largest_batch": LadderRow("+ largest batch, of the fastest row above"),
}
FORMER_ORDER = [name for name in RUNGS if name != "bf16_weights"]
FORMER_ORDER.insert(FORMER_ORDER.index("fp8") + 1, "bf16_weights")
"""The order that manifests of before have, in which bf16_weights came after fp8."""
CHECKPOINTING = ("selective", "full")
"""Rows that give speed for memory, which pays at the largest batch if anywhere; the top of the ladder is without."""
SAME_SPEED = 0.02
"""Share by which the speeds of two rows must differ to count: medians of a row's steps repeat that well."""


class LadderConfig(Config):
    """Training speed, peak memory and held-out loss as each means is added to float32 eager training: see `rows`.

    Every row trains the model from the same fresh weights on the same `loss_steps` steps, and is timed over
    `timed_steps` of them after `warmup_steps`. The rate rises over `lr_warmup_ratio` of the steps and falls to zero as
    `scheduler` sets, and gradients are clipped at the norm of any phase: a constant rate leaves a run wherever its last
    steps have thrown it, which after few steps of few tokens differs by more than any row changes.
    The ladder's top is its fastest row that keeps all activations and whose held-out loss is within
    `loss_tolerance` nats of row 0's (`top_of`): speed that is paid for in loss is no more than a row. `twins`
    trains it again so many times with every first weight moved by one unit in the last place and other draws of
    dropout: how the losses of these runs spread is `loss_noise`, which a row's change of held-out loss is to be read
    against. `leave_one_out` takes each means alone out of the top. `largest` finds each
    row's largest batch and its speed there, with up to `most_batch` sequences and `largest_seconds` for all rows.
    `bf16_weights` is a row that has to be asked for. What a device cannot do is a row with the reason, and the next
    row does without it. A row that runs out of memory takes half as many sequences twice.
    """

    type: Literal["ladder"] = Field(description="kind of the benchmark")
    rows: Annotated[tuple[RowName, ...], Field(min_length=1)] = Field(
        default=tuple(name for name in RUNGS if name != "bf16_weights"),
        description="means of speed or memory, switched on one after the other",
    )
    batch_size: Positive = Field(default=8, description="sequences of a forward pass")
    gradient_accumulation_steps: Positive = Field(
        default=1, description="forward passes of an optimiser step"
    )
    block_size: Positive = Field(default=2048, description="tokens of a sequence")
    lr: PositiveFloat | Literal["auto"] = Field(
        default="auto", description="peak learning rate; auto: the published rate for the width"
    )
    warmup_steps: Positive = Field(default=20, description="steps before the timing starts")
    timed_steps: Positive = Field(default=50, description="steps that are timed")
    loss_steps: Positive = Field(
        default=200, description="steps of training before the held-out loss is measured"
    )
    scheduler: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="learning-rate schedule: constant, linear, cosine or wsd"
    )
    lr_warmup_ratio: Probability = Field(
        default=0.1, description="share of the steps in which the learning rate rises"
    )
    val_windows: Positive = Field(
        default=64, description="held-out windows of block_size tokens that the loss is measured on"
    )
    loss_tolerance: NonNegativeFloat = Field(
        default=0.01,
        description="largest rise of the held-out loss over the first row, in nats, of a row that may be the "
        "top",
    )
    twins: Annotated[int, Field(ge=0, le=16)] = Field(
        default=2, description="repeats of the top with other rounding, which measure the noise of the loss"
    )
    float8_min_width: Positive = Field(
        default=1024, description="narrowest side of a linear layer that the fp8 row computes in float8"
    )
    leave_one_out: bool = Field(
        default=True, description="whether the top is also measured without each of its means"
    )
    largest: bool = Field(default=True, description="whether the largest batch of each row is searched for")
    most_batch: Positive = Field(default=512, description="largest batch that the search tries, in sequences")
    largest_seconds: Positive = Field(
        default=900, description="time limit of that search for all rows, in seconds"
    )
    memory_utilization: Share = Field(
        default=0.9, description="share of the free device memory that a batch may take"
    )

    @field_validator("rows", mode="after")
    @classmethod
    def _in_order(cls, rows: tuple[RowName, ...]) -> tuple[RowName, ...]:
        """Put rows that are in the former order into that of the ladder, so that runs of before can be read."""
        places = [FORMER_ORDER.index(name) for name in rows]
        return tuple(sorted(rows, key=list(RUNGS).index)) if places == sorted(set(places)) else rows

    @model_validator(mode="after")
    def _rules(self) -> LadderConfig:
        order = list(RUNGS)
        places = [order.index(name) for name in self.rows]
        if places != sorted(set(places)) or self.rows[0] != "baseline":
            raise ValueError(
                f"rows={list(self.rows)} is no ladder: each row adds to those before it; begin with baseline and name "
                f"rows once, in the order {', '.join(order)}"
            )
        if self.loss_steps < self.warmup_steps + self.timed_steps:
            raise ValueError(
                f"loss_steps={self.loss_steps} are fewer than warmup_steps={self.warmup_steps} and timed_steps="
                f"{self.timed_steps}, which are among them; raise it, or lower them"
            )
        if "largest_batch" in self.rows and not self.largest:
            raise ValueError(
                "rows name largest_batch, which largest=false does not look for; remove one of the two"
            )
        return self


def row_keys(names: Iterable[RowName]) -> dict[str, Any]:
    """Return the phase's keys with these rows' means on top of the baseline's, in the order of the ladder."""
    on = {"baseline", *names}
    keys: dict[str, Any] = {}
    for name, rung in RUNGS.items():
        if name in on:
            keys |= rung.keys
    return keys


def without(names: Iterable[RowName], left_out: RowName) -> dict[str, Any]:
    """Return the phase's keys with these rows' means on but one."""
    return row_keys(names) | RUNGS[left_out].undone


def fastest(
    rows: Iterable[Mapping[str, Any]], speed: str = "tok_s", memory: str = "peak_bytes"
) -> Mapping[str, Any] | None:
    """Return the fastest of measured rows, None of none; of those within `SAME_SPEED` of it the one of least memory."""
    known = [row for row in rows if row.get(speed) is not None]
    best = max((row[speed] for row in known), default=0.0)
    near = [row for row in known if row[speed] >= (1.0 - SAME_SPEED) * best]
    return min(near, key=lambda row: row[memory], default=None)


def top_of(rows: Iterable[Mapping[str, Any]], loss_tolerance: float) -> Mapping[str, Any] | None:
    """Return the ladder's top: of its own rows that keep all activations, and row 0's held-out loss within a tolerance,
    the `fastest` at the ladder's batch.

    A means that costs more than it gives is thus not in the top, unless a later row makes up for it.
    """
    apart = {*CHECKPOINTING, "largest_batch"}
    own = (row for row in rows if row["row"] in RUNGS and row["row"] not in apart)
    return fastest(row for row in own if abs(row.get("val_loss_delta") or 0.0) <= loss_tolerance)
