"""Schema of the benchmarks that run after training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    field_validator,
    model_validator,
)

from caramba.config.base import Config, PathText, Probability, Share
from caramba.config.extension import OrExtension, OwnBenchmarkConfig
from caramba.config.kvcache import EXACT_KINDS, CacheKind, KVCacheKind
from caramba.config.layer_base import Positive
from caramba.config.optimizer import Strategies

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
    "fused_ce": LadderRow("+ head and loss in chunks", {"cross_entropy": "chunked"}, {"cross_entropy": "dense"}),
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
    gradient_accumulation_steps: Positive = Field(default=1, description="forward passes of an optimiser step")
    block_size: Positive = Field(default=2048, description="tokens of a sequence")
    lr: PositiveFloat | Literal["auto"] = Field(
        default="auto", description="peak learning rate; auto: the published rate for the width"
    )
    warmup_steps: Positive = Field(default=20, description="steps before the timing starts")
    timed_steps: Positive = Field(default=50, description="steps that are timed")
    loss_steps: Positive = Field(default=200, description="steps of training before the held-out loss is measured")
    scheduler: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine", description="learning-rate schedule: constant, linear, cosine or wsd"
    )
    lr_warmup_ratio: Probability = Field(default=0.1, description="share of the steps in which the learning rate rises")
    val_windows: Positive = Field(
        default=64, description="held-out windows of block_size tokens that the loss is measured on"
    )
    loss_tolerance: NonNegativeFloat = Field(
        default=0.01,
        description="largest rise of the held-out loss over the first row, in nats, of a row that may be the top",
    )
    twins: Annotated[int, Field(ge=0, le=16)] = Field(
        default=2, description="repeats of the top with other rounding, which measure the noise of the loss"
    )
    float8_min_width: Positive = Field(
        default=1024, description="narrowest side of a linear layer that the fp8 row computes in float8"
    )
    leave_one_out: bool = Field(default=True, description="whether the top is also measured without each of its means")
    largest: bool = Field(default=True, description="whether the largest batch of each row is searched for")
    most_batch: Positive = Field(default=512, description="largest batch that the search tries, in sequences")
    largest_seconds: Positive = Field(default=900, description="time limit of that search for all rows, in seconds")
    memory_utilization: Share = Field(default=0.9, description="share of the free device memory that a batch may take")

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
            raise ValueError("rows name largest_batch, which largest=false does not look for; remove one of the two")
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


OptimizerRow = Literal["adamw", "lion", "muon", "swats", "pidao", "pidao_adaptive", "nowcast", "orchestrator"]
ROW_LR: dict[str, float] = {"lion": 0.2, "muon": 4.0, "pidao": 2.0}
"""Rates that a row's search is around, as multiples of lr; others' are lr itself."""
ROW_KEYS: dict[str, dict[str, Any]] = {
    "swats": {"swats": {"tolerance": 1e-5}},
    "pidao": {"pidao": {"kp": 1000.0, "ki": 5.0, "kd": 20.0, "damping": 25.0}},
}


class OptimizersConfig(Config):
    """Held-out loss of one model trained by several optimisers, each with the same number of rates tried.

    Each row trains with every one of `rates` on one order of the data; the best by one half of the held-out windows
    then trains with `seeds` other orders, scored on the other half. Differences are paired with AdamW's by seed. Trials
    of `orchestrator` and `nowcast` count as steps of their own: their phase is as much shorter. With `search_steps`
    their rates are those tried by AdamW, with which they begin. With `equal_time`, after all rows,
    AdamW trains again for as many steps as take the row's seconds, and so does the best fixed row of the
    orchestrator's portfolio for it. With `objective: kl` rows distil copies of the student, as it comes from its
    teacher or a checkpoint, in place of fresh models, and losses are divergences.
    """

    type: Literal["optimizers"] = Field(description="kind of the benchmark")
    rows: Annotated[tuple[OptimizerRow, ...], Field(min_length=1)] = Field(
        default=("adamw", "lion", "muon", "swats", "pidao", "nowcast", "orchestrator"),
        description="optimisers to compare; adamw first",
    )
    objective: Literal["ce", "kl"] = Field(
        default="ce",
        description="ce: fresh models learn the text; kl: copies of the student learn its teacher's output",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="of the computation")
    compile: bool | Literal["default", "reduce-overhead", "max-autotune"] = Field(
        default=False, description="as train.compile; all runs share what is compiled"
    )
    steps: Positive = Field(default=400, description="optimiser steps of a run, trials included")
    search_steps: Positive | None = Field(
        default=None, description="optimiser steps of the trial of a rate; unset: steps"
    )
    batch_size: Positive = Field(default=8, description="sequences of a step")
    block_size: Positive = Field(default=128, description="tokens of a sequence")
    lr: PositiveFloat = Field(default=4e-3, description="AdamW's rate, which the search is around")
    rates: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] = Field(
        default=(0.25, 0.5, 1.0, 2.0, 4.0), description="multiples of the rate that every row tries"
    )
    weight_decay: NonNegativeFloat = Field(default=0.1, description="decoupled weight decay")
    seeds: Annotated[int, Field(ge=2)] = Field(default=5, description="orders of the data that are scored")
    val_windows: Annotated[int, Field(ge=4)] = Field(default=64, description="held-out windows, in two halves")
    equal_time: bool = Field(default=True, description="whether AdamW is also trained for a row's seconds")
    seconds: PositiveFloat | None = Field(
        default=None,
        description="time that the table may take; what would end after it is left out by name; unset: no limit",
    )
    strategies: Strategies = Field(
        default={}, description="strategies of the row orchestrator; unset: train's, conservative_adamw and muon"
    )
    decision_interval: Positive | None = Field(
        default=None, description="steps between decisions; unset: train's, or a quarter of fewer steps"
    )
    decisions: Positive | None = Field(
        default=1,
        description="most decisions of a run whose trials cost all that they may; null: as many as there is room for",
    )
    eval_horizon: Positive = Field(default=32, description="steps of a trial")
    repeats: Annotated[int, Field(ge=2)] = Field(default=3, description="repeats of a trial")

    @model_validator(mode="after")
    def _rules(self) -> OptimizersConfig:
        if self.rows[0] != "adamw" or len(set(self.rows)) != len(self.rows):
            raise ValueError(
                f"rows={list(self.rows)}: every row is compared with adamw; name it first, and each row once"
            )
        return self


class WeightFormat(StrEnum):
    """What linear layers store: codes of 8 or 4 bits, with 16-bit activations or 8-bit ones (`int8_dynamic`)."""

    INT8 = "int8"
    INT4 = "int4"
    INT8_DYNAMIC = "int8_dynamic"


class CalibrationConfig(Config):
    """How `int8_dynamic` finds the range of each activation channel on text: its largest magnitude, or a percentile.

    The ranges move size from activations to weights channel by channel, so that one scale per token serves all
    channels; a percentile keeps a few outlying tokens from setting them.
    """

    method: Literal["max", "percentile"] = Field(
        default="max",
        description="range of an activation channel: its largest magnitude (max) or a percentile",
    )
    percentile: Annotated[float, Field(ge=90, lt=100)] = Field(
        default=99.9, description="of method=percentile: of the magnitudes of each channel"
    )
    tokens: Positive = Field(default=2048, description="tokens of text that the ranges are taken from")

    @model_validator(mode="after")
    def _percentile_has_a_use(self) -> CalibrationConfig:
        default = type(self).model_fields["percentile"].default
        if self.method == "max" and self.percentile != default:
            raise ValueError(
                f"percentile={self.percentile:g} is of method=percentile, got method=max; set it, or leave it out"
            )
        return self


Lengths = Annotated[tuple[Positive, ...], Field(min_length=1)]
ModelName = Literal["teacher", "student"]
SUITE_SUFFIXES = (".yaml", ".yml", ".jsonl")
"""Ends of the names of tasks that are paths of suites."""
ROTATED_KINDS = (KVCacheKind.Q4_0, KVCacheKind.NF4, KVCacheKind.MIXED)


def _named(kind: KVCacheKind) -> KVCacheKind:
    if kind is KVCacheKind.AUTO:
        raise ValueError("got auto, which chooses a format for one generation; name a format, such as fp16 or q8_0")
    return kind


NamedCacheKind = Annotated[CacheKind, AfterValidator(_named)]
"""A kind that has a size: any but auto."""


class Measurement(Config):
    """A kind of benchmark: what it measures and how.

    `target` is "module:function", called with the config, the `Subjects` and the benchmark's id; it returns metrics and
    rows. It is imported when the benchmark runs, so that schemas need no torch.
    """

    target: ClassVar[str]


class PerplexityBenchmarkConfig(Measurement):
    """Mean NLL over disjoint held-out windows of `block_size` tokens.

    `dataset` is the path of other tokens to measure on: the validation split of a token folder (its train split when
    it has no other), or a whole .npy or .tokens file, in windows of one stream.

    With `cache_kind` every window is read through a cache of that format in chunks of `cache_tail_tokens`, so that each
    token is predicted from what a decode would have stored by then: older tokens in that format, quantised by chunks,
    the chunk's own in 16 bits. `cache_hadamard` rotates keys and latents before 4 bits.
    """

    target = "caramba.evaluation.perplexity:perplexity"

    type: Literal["perplexity"] = Field(description="kind of the benchmark")
    dataset: str | None = Field(
        default=None,
        description="tokens to measure on: a token folder, .npy or .tokens; unset: the held-out split of the run",
    )
    block_size: Positive = Field(default=256, description="tokens of a window")
    batch_size: Positive = Field(default=8, description="windows of a forward pass")
    num_batches: Positive = Field(default=32, description="number of batches")
    cache_kind: NamedCacheKind | None = Field(
        default=None, description="format of the KV cache that windows are read through; unset: no cache"
    )
    cache_tail_tokens: Positive = Field(default=64, description="tokens of a chunk, which stay in 16 bits")
    cache_hadamard: bool = Field(
        default=False, description="whether keys and latents are rotated before 4-bit quantisation"
    )

    @model_validator(mode="after")
    def _rules(self) -> PerplexityBenchmarkConfig:
        if self.cache_kind is not None:
            _refuse_empty_cache(self, [self.cache_kind])
        if self.cache_hadamard and self.cache_kind not in ROTATED_KINDS:
            raise ValueError(
                f"cache_hadamard rotates before 4 bits, got cache_kind={self.cache_kind}; "
                f"use one of {', '.join(ROTATED_KINDS)}, or remove it"
            )
        return self


class LatencyBenchmarkConfig(Measurement):
    """Prefill, decode, TTFT, ITL and throughput, per prompt length, generation length and batch size.

    `cache_kind` names the format of the cache; without it fp32.
    """

    target = "caramba.evaluation.latency:latency"

    type: Literal["latency"] = Field(description="kind of the benchmark")
    prompt_lengths: Lengths = Field(default=(128,), description="prompt lengths to measure, in tokens")
    generation_lengths: Lengths = Field(default=(32,), description="numbers of new tokens to measure")
    batch_sizes: Lengths = Field(default=(1,), description="batch sizes to measure, in sequences")
    warmup_runs: NonNegativeInt = Field(default=2, description="runs before the timing starts")
    timed_runs: Positive = Field(default=5, description="runs that are timed")
    cache_kind: NamedCacheKind | None = Field(default=None, description="format of the KV cache; unset: fp32")


class MemoryBenchmarkConfig(Measurement):
    """Cache bytes summed from allocated tensors, model bytes and peak, per sequence length and cache format."""

    target = "caramba.evaluation.memory:memory"

    type: Literal["memory"] = Field(description="kind of the benchmark")
    sequence_lengths: Lengths = Field(default=(256,), description="sequence lengths to measure, in tokens")
    batch_size: Positive = Field(default=1, description="number of sequences")
    quantization_modes: Annotated[tuple[NamedCacheKind, ...], Field(min_length=1)] = Field(
        default=(KVCacheKind.FP16,), description="formats of the KV cache to measure"
    )


class AccuracyBenchmarkConfig(Measurement):
    """Tasks of lm-evaluation-harness, which the extra `eval` installs; `include_path` adds a folder of own tasks.

    `tasks` are names, groups or patterns; `limit` takes the first so many documents of each. `max_length` is the number
    of tokens that a model reads at most, by default what it trained on. With `eval_data` the tasks are files of that
    folder, `NAME.jsonl` or `NAME.txt`, and no harness is needed; `limit` then keeps evenly spaced items. A task whose
    name ends in .yaml, .yml or .jsonl is the path of a suite of one's own, which needs no harness either.
    """

    target = "caramba.evaluation.accuracy:accuracy"

    type: Literal["accuracy"] = Field(description="kind of the benchmark")
    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = Field(
        description="names, groups or patterns of tasks"
    )
    limit: Positive | None = Field(default=None, description="items of each task; unset: all")
    num_fewshot: NonNegativeInt | None = Field(
        default=None, description="examples in front of each item; unset: the number of the task"
    )
    include_path: PathText | None = Field(
        default=None, description="folder of more task files for lm-evaluation-harness"
    )
    eval_data: str | None = Field(default=None, description="folder of local tasks, which need no harness")
    batch_size: Positive = Field(default=8, description="sequences of a forward pass")
    max_length: Positive | None = Field(
        default=None, description="longest sequence, in tokens; unset: the length of training"
    )
    smallest_difference: Share | None = Field(
        default=None,
        description="smallest difference of two accuracies that matters, as a share; warns before a task whose items "
        "cannot see it",
    )
    allow_code: bool = Field(
        default=False,
        description="whether suites may run Python that the model wrote, in a sandbox without network",
    )

    @property
    def suites(self) -> tuple[str, ...]:
        """Tasks that are paths of suites."""
        return tuple(task for task in self.tasks if task.endswith(SUITE_SUFFIXES))

    @model_validator(mode="after")
    def _check_eval_data(self) -> AccuracyBenchmarkConfig:
        if self.suites and len(self.suites) < len(self.tasks) and self.eval_data is None:
            raise ValueError(
                f"tasks={list(self.tasks)} mixes suites with tasks of lm-evaluation-harness; give each a benchmark of "
                "its own"
            )
        if self.eval_data is not None and (self.include_path is not None or self.num_fewshot is not None):
            raise ValueError(
                "eval_data reads local tasks without lm-evaluation-harness; remove include_path and num_fewshot"
            )
        return self


ControlName = Literal["copy", "weight_svd", "random", "teacher_continued"]


class ControlsBenchmarkConfig(Config):
    """Alternatives to the student from the same teacher and cache bytes, compared on held-out windows.

    `copy` pools key/value heads, `weight_svd` and `random` have the student's widths, `teacher_continued` is the phase
    with `control: true`; each of `cache_kinds` is the teacher itself read through a cache of that kind in
    chunks of `cache_tail_tokens`, which stay in 16 bits. With `distil`
    the students among them also go through the student's phases: the same tokens in the same order, the same seed.
    """

    type: Literal["controls"] = Field(description="kind of the benchmark")
    controls: tuple[ControlName, ...] = Field(
        default=("copy", "weight_svd", "random", "teacher_continued"),
        description="controls to build: copy, weight_svd, random, teacher_continued",
    )
    cache_kinds: tuple[NamedCacheKind, ...] = Field(
        default=(), description="formats of the KV cache that the teacher is read through"
    )
    cache_tail_tokens: Positive = Field(default=16, description="tokens of a chunk, which stay in 16 bits")
    distil: bool = Field(default=False, description="whether controls are trained in the phases of the student")
    block_size: Positive = Field(default=256, description="tokens of a window")
    batch_size: Positive = Field(default=8, description="windows of a forward pass")
    num_batches: Positive = Field(default=32, description="number of batches")

    @model_validator(mode="after")
    def _caches_store_something(self) -> ControlsBenchmarkConfig:
        _refuse_empty_cache(self, self.cache_kinds)
        return self


def _refuse_empty_cache(
    config: PerplexityBenchmarkConfig | ControlsBenchmarkConfig, kinds: Sequence[KVCacheKind]
) -> None:
    quantised = [kind for kind in kinds if kind not in EXACT_KINDS]
    if quantised and config.block_size <= 2 * config.cache_tail_tokens:
        raise ValueError(
            f"block_size={config.block_size} fits the 16-bit tail of 2 x cache_tail_tokens={config.cache_tail_tokens}, "
            f"so {quantised[0]} would store nothing; use a larger block_size or fewer cache_tail_tokens"
        )


class WeightsBenchmarkConfig(Measurement):
    """Held-out NLL and bytes of weights of 8 and 4 bits, against the same model in 16 bits (`dtype`).

    `head` quantises the head as well; `calibration` takes the ranges of `int8_dynamic` from training text.
    """

    target = "caramba.evaluation.weights:weights"

    type: Literal["weights"] = Field(description="kind of the benchmark")
    formats: Annotated[tuple[Literal["int8", "int4", "int8_dynamic"], ...], Field(min_length=1)] = Field(
        default=("int8", "int4", "int8_dynamic"),
        description="formats of the weights: int8, int4, int8_dynamic",
    )
    dtype: Literal["bf16", "fp16"] = Field(default="bf16", description="16-bit format to compare with: bf16 or fp16")
    head: bool = Field(default=False, description="whether the output head is quantised too")
    calibration: CalibrationConfig = Field(
        default=CalibrationConfig(), description="how int8_dynamic finds activation ranges"
    )
    block_size: Positive = Field(default=256, description="tokens of a window")
    batch_size: Positive = Field(default=8, description="windows of a forward pass")
    num_batches: Positive = Field(default=32, description="number of batches")


RungName = Literal["eager_math", "flash", "graphs", "int8", "tp2"]


STAGED = (ControlsBenchmarkConfig, LadderConfig, OptimizersConfig)
"""Benchmarks of a whole group, whose rows are stages of their own."""


class InferenceLadderConfig(Measurement):
    """Latency per token and throughput as each means of speed is added: see `rungs`.

    `eager_math` is the host's loop with plain attention; `flash` adds the best SDPA backend and fused decode, `graphs`
    the compiled step in a CUDA graph, `int8` weights of 8 bits, `tp2` tensor parallelism over two devices. What a
    device has not is a row with the reason, and the next rung does without it.
    """

    target = "caramba.evaluation.ladder:inference_ladder"

    type: Literal["inference_ladder"] = Field(description="kind of the benchmark")
    rungs: Annotated[tuple[RungName, ...], Field(min_length=1)] = Field(
        default=("eager_math", "flash", "graphs", "int8", "tp2"), description="means of speed, added in order"
    )
    prompt_length: Positive = Field(default=128, description="tokens of the prompt")
    new_tokens: Annotated[int, Field(ge=2)] = Field(default=64, description="tokens to generate, at least 2")
    batch_size: Positive = Field(default=1, description="number of sequences")
    warmup_runs: Positive = Field(default=1, description="runs before the timing starts")
    timed_runs: Positive = Field(default=7, description="runs that are timed")

    @model_validator(mode="after")
    def _once(self) -> InferenceLadderConfig:
        if len(set(self.rungs)) < len(self.rungs):
            raise ValueError(f"rungs={list(self.rungs)} names one twice; name each once")
        return self


AttentionName = Literal["memory", "window", "window_equal_bytes", "full"]


class RecallBenchmarkConfig(Measurement):
    """Recall of key and value pairs `windows` windows back, by small models that are trained for it.

    For each model with memory slots: models of `blocks` blocks of its attention (`memory`), of its window alone, of a
    window that takes the same cache bytes, and of full attention, each trained for `steps` steps of `batch_size` rows,
    with the numbers of `pairs` in turn. Several `memory_slots` make a grid of pairs and slots.

    For each of `lengths` and `ratios` the memory is also read behind that many tokens, its window as much longer that
    window and slots are length / ratio tokens, and so is full attention; rows of `context_tokens` tokens in all.
    """

    target = "caramba.evaluation.recall:recall"

    type: Literal["recall"] = Field(description="kind of the benchmark")
    attentions: Annotated[tuple[AttentionName, ...], Field(min_length=1)] = Field(
        default=("memory", "window", "window_equal_bytes", "full"),
        description="attentions to train and compare",
    )
    pairs: Annotated[tuple[Annotated[int, Field(ge=1, le=32)], ...], Field(min_length=1)] = Field(
        default=(4, 8), description="numbers of pairs to measure, from 1 to 32"
    )
    windows: Positive = Field(default=16, description="length of a row before its questions, in windows")
    local_window: Positive | None = Field(
        default=None, description="window of the trained models, in tokens; unset: the model's"
    )
    memory_slots: Annotated[tuple[Positive, ...], Field(min_length=1)] | Positive | None = Field(
        default=None, description="slots of the trained models, one number or several; unset: the model's"
    )
    lengths: tuple[Positive, ...] = Field(
        default=(), description="tokens behind which trained models are read as well; empty: none"
    )
    ratios: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        default=(2, 16, 128), description="of lengths: tokens of a text for one of window and slots"
    )
    context_tokens: Positive = Field(default=131072, description="of lengths: tokens to read at each; at least one row")
    d_model: Positive | None = Field(
        default=None,
        description="width of the trained models, with as many heads of the model's size as it holds and a key/value "
        "head for each; unset: the model's width and heads",
    )
    blocks: Positive = Field(default=2, description="blocks of attention and SwiGLU")
    steps: Positive = Field(default=800, description="training steps")
    batch_size: Positive = Field(default=64, description="rows of a step")
    lr: PositiveFloat = Field(default=3e-3, description="peak learning rate")
    eval_batches: Positive = Field(default=4, description="batches of held-out rows")
    seeds: Positive = Field(default=1, description="number of trained models, each with its own seed")


class LongContextBenchmarkConfig(Measurement):
    """What is far back: pass keys, one of several keys, and perplexity by position, on held-out text.

    Per length `items` rows hide one sentence with five digits, and `items` rows one of `pairs` such sentences that the
    row's end asks for. Perplexity by position takes `windows` windows of the longest length.
    """

    target = "caramba.evaluation.long_context:long_context"

    type: Literal["long_context"] = Field(description="kind of the benchmark")
    lengths: Lengths = Field(default=(2048, 4096, 8192), description="lengths of rows, in tokens")
    items: Positive = Field(default=100, description="rows of each task at each length")
    pairs: Annotated[int, Field(ge=2, le=30)] = Field(default=8, description="keys in a row of recall, 2 to 30")
    windows: Positive = Field(default=32, description="windows of perplexity by position")
    batch_size: Positive = Field(default=4, description="rows of a forward pass")

    @model_validator(mode="after")
    def _once(self) -> LongContextBenchmarkConfig:
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError(f"lengths={list(self.lengths)} names one twice; name each once")
        return self


class MemoryGapBenchmarkConfig(Measurement):
    """What the teacher gains beyond a window, and how much of it a student with memory slots keeps.

    On `windows` held-out windows of `block_size` tokens: the teacher, the teacher with a window alone, the student. The
    gain is that of positions `start` on.
    """

    target = "caramba.evaluation.memory_gap:memory_gap"

    type: Literal["memory_gap"] = Field(description="kind of the benchmark")
    block_size: Positive = Field(default=8192, description="tokens of a held-out window")
    windows: Positive = Field(default=32, description="number of held-out windows")
    batch_size: Positive = Field(default=1, description="held-out windows of a forward pass")
    start: Positive = Field(default=2048, description="first position at which the gain counts")
    local_window: Positive | None = Field(
        default=None, description="window of the teacher with a window alone, in tokens; unset: the student's"
    )
    min_gain: PositiveFloat = Field(
        default=0.02, description="least gain of the teacher, in nats, of which a share is reported"
    )


class GenerationBenchmarkConfig(Measurement):
    """Quality of continuations of held-out text: repeated 4-grams, distinct 1- and 2-grams, length.

    A student wins a prompt where its log-likelihood of the held-out continuation is above the teacher's by more than
    `tie_margin` nats a token, and ties within it.
    """

    target = "caramba.evaluation.generation:generation"

    type: Literal["generation"] = Field(description="kind of the benchmark")
    num_prompts: Annotated[int, Field(ge=2)] = Field(default=64, description="number of prompts, at least 2")
    prompt_length: Positive = Field(default=64, description="tokens of a prompt")
    max_new_tokens: Positive = Field(default=64, description="most new tokens of a text")
    batch_size: Positive = Field(default=8, description="prompts that are continued together")
    temperature: NonNegativeFloat = Field(default=0.0, description="softmax temperature; 0: the most likely token")
    top_p: Share = Field(default=1.0, description="keep the fewest tokens whose probabilities reach this sum")
    tie_margin: NonNegativeFloat = Field(
        default=0.01, description="largest difference of log-likelihoods that is a tie, in nats a token"
    )
    seed: NonNegativeInt = Field(default=1337, description="seed of the first prompt, one more for each further")


BenchmarkKind = Annotated[
    PerplexityBenchmarkConfig
    | LatencyBenchmarkConfig
    | MemoryBenchmarkConfig
    | AccuracyBenchmarkConfig
    | ControlsBenchmarkConfig
    | WeightsBenchmarkConfig
    | InferenceLadderConfig
    | LadderConfig
    | OptimizersConfig
    | RecallBenchmarkConfig
    | LongContextBenchmarkConfig
    | MemoryGapBenchmarkConfig
    | GenerationBenchmarkConfig,
    Field(discriminator="type"),
    OrExtension(OwnBenchmarkConfig),
]


class BenchmarkConfig(Config):
    """One benchmark of a suite: what to measure, on which models, how often."""

    id: Annotated[str, Field(max_length=100)] = Field(description="name of the benchmark in tables and files")
    config: BenchmarkKind = Field(description="what is measured")
    models: Annotated[tuple[ModelName, ...], Field(min_length=1)] = Field(
        default=("teacher", "student"), description="models to measure: teacher, student or both"
    )
    repeats: Positive = Field(default=1, description="number of repeats of the measurement")
