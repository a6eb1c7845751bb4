"""What the stages of a run return: frozen records that hold plain numbers and paths, never tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Self, cast

WINDOW_NLL = "window_nll"
"""The column of a perplexity row that holds the mean NLL of each window, which pairs models; in no CSV."""
ITEMS = "items"
"""The column of an accuracy row that holds the score of each item (`TaskItems`); written to items.csv."""
HIDDEN_COLUMNS = frozenset({WINDOW_NLL, ITEMS})
"""Columns with a value for each item, which the CSV of a benchmark leaves out."""


@dataclass(frozen=True)
class Metric:
    """One measured number: `std` is the deviation of its `n` samples, `standard_error` that of their mean.

    A metric has one of them or none: losses, accuracies and what follows from them have the standard error.
    `source` names what measured it: a benchmark or phase id.
    """

    key: str
    value: float
    unit: str
    n: int | None = None
    std: float | None = None
    source: str = ""
    standard_error: float | None = None

    @property
    def spread(self) -> float | None:
        """The number after a plus-minus: the deviation, or the standard error, or None."""
        return self.standard_error if self.std is None else self.std


@dataclass(frozen=True)
class BenchmarkResult:
    """Outcome of one benchmark: its metrics, the raw rows for a CSV, or the error that stopped it."""

    id: str
    type: str
    metrics: tuple[Metric, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    seconds: float = 0.0

    @property
    def succeeded(self) -> bool:
        return self.error is None


@dataclass(frozen=True)
class Check:
    """One threshold of a verification: `value` passes when at most `bound`; without a bound it is only recorded.

    With `is_minimum` it passes when at least `bound`.
    """

    name: str
    value: float
    bound: float | None
    unit: str = ""
    is_minimum: bool = False

    @property
    def passed(self) -> bool:
        if self.bound is None:
            return True
        return self.value >= self.bound if self.is_minimum else self.value <= self.bound


@dataclass(frozen=True)
class Answer:
    """One model's answer to a case, None when its text has none, and its text.

    `text` is what it wrote, of a generated answer; `logprobs` (nats) and `logprobs_per_token` are those of the choices.
    """

    model: str
    answer: str | None
    is_correct: bool
    text: str | None = None
    logprobs: tuple[float, ...] = ()
    logprobs_per_token: tuple[float, ...] = ()


@dataclass(frozen=True)
class Case:
    """One question of a verification with every model's answer.

    `dropped_tokens` is how many tokens at the beginning of the prompt did not fit the context window.
    """

    id: str
    kind: str
    prompt: str
    expected: str
    answers: tuple[Answer, ...]
    choices: tuple[str, ...] = ()
    length_normalized: bool | None = None
    dropped_tokens: int = 0


@dataclass(frozen=True)
class Verdict:
    """Outcome of one verification of a run, and the cases that it asked, if it asks any."""

    type: str
    run_id: str
    checks: tuple[Check, ...]
    fail_fast: bool = False
    cases: tuple[Case, ...] = ()

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class TransplantedLayer:
    """What surgery made of one attention layer; widths are those that its cache stores per token, in elements.

    `error` is the block output's relative root-mean-square error on held-out windows and `energy_kept` the variance
    that the low-rank maps keep, where the method knows them; `frequencies` counts the distinct rotary frequencies.
    """

    name: str
    layout: str
    sem_dim: int
    geo_dim: int
    v_dim: int
    cached: int
    teacher_cached: int
    energy_kept: float | None = None
    error: float | None = None
    beta: float | None = None
    frequencies: int | None = None


@dataclass(frozen=True)
class TransplantReport:
    """What surgery did: every student weight's source, the unmapped weights of both sides, and each layer's error.

    Under `surgery.kv_budget_formats` also the untrained student's KL to its teacher, predicted from calibration text
    that it did not see and measured on the validation split.
    """

    method: str
    copied: tuple[str, ...]
    initialised: tuple[str, ...]
    unmapped_teacher: tuple[str, ...]
    layer_errors: tuple[float, ...] = ()
    energy_kept: tuple[float, ...] = ()
    layers: tuple[TransplantedLayer, ...] = ()
    calibration_tokens: int = 0
    predicted_kl: float | None = None
    measured_kl: float | None = None


@dataclass(frozen=True)
class PhaseResult:
    """Outcome of one phase: what it trained, on how many tokens, and its final weights (relative to the run).

    `loss` is the mean of the last 50 training steps, `val_loss` the held-out loss of the last validation.
    """

    id: str
    phase: str
    trains: str
    steps: int
    tokens: int
    seconds: float
    checkpoint: str
    loss: float | None = None
    skipped: str | None = None
    details: dict[str, Any] = field(default_factory=lambda: {})
    val_loss: float | None = None

    @classmethod
    def untrained(cls, stage: str, phase: str, seconds: float = 0.0) -> Self:
        """Return the outcome of a stage that leaves no weights."""
        return cls(stage, phase, "none", 0, 0, seconds, "")


@dataclass(frozen=True)
class RunResult:
    """Everything a run measured; `artifact.write` turns it into files."""

    name: str
    run_id: str
    manifest_sha256: str
    git_commit: str | None
    environment: dict[str, Any]
    plan: dict[str, Any]
    phases: tuple[PhaseResult, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    benchmarks: tuple[BenchmarkResult, ...] = ()
    transplant: TransplantReport | None = None
    labels: dict[str, str] = field(default_factory=lambda: {})

    @property
    def metrics(self) -> dict[str, Metric]:
        """All metrics by key, in the order in which they were measured."""
        return {metric.key: metric for bench in self.benchmarks for metric in bench.metrics}


@dataclass(frozen=True)
class Artifact:
    """A file of a run, relative to its artifacts folder, with the SHA-256 of its bytes."""

    path: str
    sha256: str


@dataclass(frozen=True)
class ArtifactIndex:
    """The files that a run wrote for its readers."""

    root: str
    entries: tuple[Artifact, ...]


def to_plain(value: Any) -> Any:
    """Turn a result into dicts, lists and scalars that JSON can hold."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in cast("list[Any]", value)]
    return value
