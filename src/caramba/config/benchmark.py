"""Schema of the benchmarks that run after training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from caramba.config.base import Config, Later
from caramba.config.kvcache import CacheKind, KVCacheKind
from caramba.config.layer import Positive

Lengths = Annotated[tuple[Positive, ...], Field(min_length=1)]
ModelName = Literal["teacher", "student"]
QUANTISED = (KVCacheKind.Q8_0, KVCacheKind.Q4_0, KVCacheKind.NF4, KVCacheKind.MIXED, KVCacheKind.AUTO)


class PerplexityBenchmarkConfig(Config):
    """Mean NLL over disjoint held-out windows of `block_size` tokens.

    `dataset` is the path of other tokens to measure on: the validation split of a token folder (its train split when
    it has no other), or a whole .npy or .tokens file, in windows of one stream.
    """

    type: Literal["perplexity"]
    dataset: str | None = None
    block_size: Positive = 256
    batch_size: Positive = 8
    num_batches: Positive = 32


class LatencyBenchmarkConfig(Config):
    """Prefill, decode, TTFT, ITL and throughput, per prompt length, generation length and batch size."""

    type: Literal["latency"]
    prompt_lengths: Lengths = (128,)
    generation_lengths: Lengths = (32,)
    batch_sizes: Lengths = (1,)
    warmup_runs: Annotated[int, Field(ge=0)] = 2
    timed_runs: Positive = 5


class MemoryBenchmarkConfig(Config):
    """Cache bytes summed from allocated tensors, model bytes and peak, per sequence length and cache format."""

    type: Literal["memory"]
    sequence_lengths: Lengths = (256,)
    batch_size: Positive = 1
    quantization_modes: Annotated[
        tuple[CacheKind, ...], Field(min_length=1), Later("the kernel and cache work", *QUANTISED)
    ] = (KVCacheKind.FP16,)


class AccuracyBenchmarkConfig(Config):
    """Tasks of lm-evaluation-harness, which the extra `eval` installs; `include_path` adds a folder of own tasks.

    `tasks` are names, groups or patterns; `limit` takes the first so many documents of each. `max_length` is the number
    of tokens that a model reads at most, by default what it trained on.
    """

    type: Literal["accuracy"]
    tasks: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    limit: Positive | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    include_path: str | None = None
    batch_size: Positive = 8
    max_length: Positive | None = None


ControlName = Literal["copy", "weight_svd", "random", "teacher_continued"]


class ControlsBenchmarkConfig(Config):
    """What else the same teacher and the same cache bytes give, beside the student, on held-out windows.

    `copy` pools key/value heads, `weight_svd` and `random` have the student's widths, `teacher_continued` is the phase
    with `control: true`; each of `cache_kinds` is the teacher itself read through a cache of that kind. With `distil`
    the students among them also go through the student's phases: the same tokens in the same order, the same seed.
    """

    type: Literal["controls"]
    controls: tuple[ControlName, ...] = ("copy", "weight_svd", "random", "teacher_continued")
    cache_kinds: Annotated[tuple[CacheKind, ...], Later("the kernel and cache work", *QUANTISED)] = ()
    distil: bool = False
    block_size: Positive = 256
    batch_size: Positive = 8
    num_batches: Positive = 32


class PendingBenchmarkConfig(Config):
    """`generation` is a known name whose benchmark comes with later work."""

    type: Literal["generation"]


BenchmarkKind = Annotated[
    PerplexityBenchmarkConfig
    | LatencyBenchmarkConfig
    | MemoryBenchmarkConfig
    | AccuracyBenchmarkConfig
    | ControlsBenchmarkConfig
    | PendingBenchmarkConfig,
    Field(discriminator="type"),
]


class BenchmarkConfig(Config):
    """One benchmark of a suite: what to measure, on which models, how often."""

    id: str
    config: BenchmarkKind
    models: Annotated[tuple[ModelName, ...], Field(min_length=1)] = ("teacher", "student")
    repeats: Positive = 1
