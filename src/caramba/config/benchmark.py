"""Schema of the benchmarks that run after training."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from caramba.config.base import Config, Later, PathText, Share
from caramba.config.extension import OrExtension, OwnBenchmarkConfig
from caramba.config.kvcache import EXACT_KINDS, CacheKind, KVCacheKind
from caramba.config.ladder import LadderConfig
from caramba.config.layer_base import Positive
from caramba.config.optimizer_table import OptimizersConfig
from caramba.config.quantise import CalibrationConfig

Lengths = Annotated[tuple[Positive, ...], Field(min_length=1)]
ModelName = Literal["teacher", "student"]
SUITE_SUFFIXES = (".yaml", ".yml", ".jsonl")
"""Ends of the names of tasks that are paths of suites."""
NOBODYS_CHOICE = Later("the inference work", KVCacheKind.AUTO)
ROTATED_KINDS = (KVCacheKind.Q4_0, KVCacheKind.NF4, KVCacheKind.MIXED)
OneCacheKind = Annotated[CacheKind | None, NOBODYS_CHOICE]


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
        description="tokens to measure on: a token folder, .npy or .tokens; unset: the held-out split of the "
        "run",
    )
    block_size: Positive = Field(default=256, description="tokens of a window")
    batch_size: Positive = Field(default=8, description="windows of a forward pass")
    num_batches: Positive = Field(default=32, description="number of batches")
    cache_kind: OneCacheKind = Field(
        default=None, description="format of the KV cache that windows are read through; unset: no cache"
    )
    cache_tail_tokens: Positive = Field(default=64, description="tokens of a chunk, which stay in 16 bits")
    cache_hadamard: bool = Field(
        default=False, description="whether keys and latents are rotated before 4-bit quantisation"
    )

    @model_validator(mode="after")
    def _rules(self) -> PerplexityBenchmarkConfig:
        is_quantised = self.cache_kind is not None and self.cache_kind not in EXACT_KINDS
        if is_quantised and self.block_size <= 2 * self.cache_tail_tokens:
            raise ValueError(
                f"block_size={self.block_size} fits the 16-bit tail of 2 x cache_tail_tokens={self.cache_tail_tokens}, "
                f"so {self.cache_kind} would store nothing; use a larger block_size or fewer cache_tail_tokens"
            )
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
    cache_kind: OneCacheKind = Field(default=None, description="format of the KV cache; unset: fp32")


class MemoryBenchmarkConfig(Measurement):
    """Cache bytes summed from allocated tensors, model bytes and peak, per sequence length and cache format."""

    target = "caramba.evaluation.memory:memory"

    type: Literal["memory"] = Field(description="kind of the benchmark")
    sequence_lengths: Lengths = Field(default=(256,), description="sequence lengths to measure, in tokens")
    batch_size: Positive = Field(default=1, description="number of sequences")
    quantization_modes: Annotated[tuple[CacheKind, ...], Field(min_length=1), NOBODYS_CHOICE] = Field(
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
    cache_kinds: Annotated[tuple[CacheKind, ...], NOBODYS_CHOICE] = Field(
        default=(), description="formats of the KV cache that the teacher is read through"
    )
    cache_tail_tokens: Positive = Field(default=16, description="tokens of a chunk, which stay in 16 bits")
    distil: bool = Field(
        default=False, description="whether controls are trained in the phases of the student"
    )
    block_size: Positive = Field(default=256, description="tokens of a window")
    batch_size: Positive = Field(default=8, description="windows of a forward pass")
    num_batches: Positive = Field(default=32, description="number of batches")

    @model_validator(mode="after")
    def _caches_store_something(self) -> ControlsBenchmarkConfig:
        quantised = [kind for kind in self.cache_kinds if kind not in EXACT_KINDS]
        if quantised and self.block_size <= 2 * self.cache_tail_tokens:
            raise ValueError(
                f"block_size={self.block_size} fits the 16-bit tail of 2 x cache_tail_tokens={self.cache_tail_tokens}, "
                f"so {quantised[0]} would store nothing; use a larger block_size or fewer cache_tail_tokens"
            )
        return self


class WeightsBenchmarkConfig(Measurement):
    """Held-out NLL and bytes of weights of 8 and 4 bits, against the same model in 16 bits (`dtype`).

    `head` quantises the head as well; `calibration` takes the ranges of `int8_dynamic` from training text.
    """

    target = "caramba.evaluation.weights:weights"

    type: Literal["weights"] = Field(description="kind of the benchmark")
    formats: Annotated[tuple[Literal["int8", "int4", "int8_dynamic"], ...], Field(min_length=1)] = Field(
        default=(
            "int8",
            "int4",
            "int8_dynamic",
        ),
        description="formats of the weights: int8, int4, int8_dynamic",
    )
    dtype: Literal["bf16", "fp16"] = Field(
        default="bf16", description="16-bit format to compare with: bf16 or fp16"
    )
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
        default=(
            "eager_math",
            "flash",
            "graphs",
            "int8",
            "tp2",
        ),
        description="means of speed, added in order",
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
    context_tokens: Positive = Field(
        default=131072, description="of lengths: tokens to read at each; at least one row"
    )
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
    pairs: Annotated[int, Field(ge=2, le=30)] = Field(
        default=8, description="keys in a row of recall, 2 to 30"
    )
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
    temperature: NonNegativeFloat = Field(
        default=0.0, description="softmax temperature; 0: the most likely token"
    )
    top_p: Share = Field(default=1.0, description="keep the fewest tokens whose probabilities reach this sum")
    tie_margin: NonNegativeFloat = Field(
        default=0.01, description="largest difference of log-likelihoods that is a tie, in nats a token"
    )
    seed: NonNegativeInt = Field(
        default=1337, description="seed of the first prompt, one more for each further"
    )


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
