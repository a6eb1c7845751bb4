"""Schema of the checks that compare a student with its teacher after training."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from caramba.config.base import Config, UnitInterval
from caramba.config.benchmark import NamedCacheKind
from caramba.config.extension import OrExtension, OwnCheckConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.layer_base import Positive
from caramba.config.source import is_mapping
from caramba.errors import quote

Text = Annotated[str, Field(min_length=1)]
CaseId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
FAIL_FAST = "whether a failed check makes the whole run fail, once all artifacts are written"
KINDS = ("int_greedy", "choice_logprob")


class IntGreedyCase(Config):
    """A prompt that is continued greedily; the first integer of the new text is the answer."""

    kind: Literal["int_greedy"] = Field(
        description="kind of the case: the first integer of a greedy continuation counts"
    )
    id: CaseId = Field(description="name of the case in reports")
    prompt: str = Field(description="text to continue")
    answer: int = Field(description="the correct integer")

    @property
    def expected(self) -> str:
        """The right answer as it is compared and shown."""
        return str(self.answer)


class ChoiceLogprobCase(Config):
    """A prompt with continuations to choose from: the one of the highest log-probability is the answer.

    `answer` is an index into `choices` or one of them. `length_normalized` lets the mean over a choice's tokens decide,
    not the sum; both are recorded.
    """

    aliases: ClassVar[dict[str, str]] = {"gold": "answer"}

    kind: Literal["choice_logprob"] = Field(
        description="kind of the case: the choice of highest log-probability counts"
    )
    id: CaseId = Field(description="name of the case in reports")
    prompt: str = Field(description="text in front of the choices")
    choices: Annotated[tuple[Text, ...], Field(min_length=2)] = Field(
        description="possible continuations, at least two"
    )
    answer: int | str = Field(description="the correct choice: its index, or its text")
    length_normalized: bool = Field(
        default=False, description="whether the mean log-probability per token decides; default: the sum"
    )

    @model_validator(mode="after")
    def _rules(self) -> ChoiceLogprobCase:
        if len(set(self.choices)) != len(self.choices):
            raise ValueError(f"case {quote(self.id)}: two choices are the same text; leave one out")
        if isinstance(self.answer, int) and not 0 <= self.answer < len(self.choices):
            raise ValueError(
                f"case {quote(self.id)}: answer={quote(self.answer)} is no index of its {len(self.choices)} choices; "
                f"use 0 to {len(self.choices) - 1}, or the text of a choice"
            )
        if isinstance(self.answer, str) and self.answer not in self.choices:
            raise ValueError(
                f"case {quote(self.id)}: answer={quote(self.answer)} is none of the choices "
                f"{', '.join(quote(choice) for choice in self.choices[:4])}; "
                "write one of them literally, or its index"
            )
        return self

    @property
    def expected(self) -> str:
        """The right choice's text."""
        return self.answer if isinstance(self.answer, str) else self.choices[self.answer]


EvalCase = Annotated[IntGreedyCase | ChoiceLogprobCase, Field(discriminator="kind")]


class AccuracyBounds(Config):
    """Share of cases that the student has to answer, and how much less than its teacher it may."""

    min_student_accuracy: UnitInterval | None = Field(
        default=None, description="lowest share of correct answers that passes, from 0 to 1; unset: no bound"
    )
    max_accuracy_drop: Annotated[float, Field(ge=-1, le=1)] | None = Field(
        default=None, description="of teacher accuracy - student accuracy"
    )

    @property
    def is_set(self) -> bool:
        """Whether there is a bound at all."""
        return self.min_student_accuracy is not None or self.max_accuracy_drop is not None


class EvalThresholds(AccuracyBounds):
    """Bounds over all cases, and over those of one kind."""

    int_greedy: AccuracyBounds = Field(default=AccuracyBounds(), description="bounds over the cases of this kind")
    choice_logprob: AccuracyBounds = Field(default=AccuracyBounds(), description="bounds over the cases of this kind")


def _tokenizer_name(value: Any) -> Any:
    if not is_mapping(value):
        return value
    encoding = value.get("encoding")
    if set(value) != {"type", "encoding"} or value["type"] != "tiktoken" or not isinstance(encoding, str):
        raise ValueError(
            "expected byte, a folder, a tokenizer file, or {type: tiktoken, encoding: NAME}, which reads NAME.tiktoken"
        )
    return f"{encoding}.tiktoken"


class EvalVerifyConfig(Config):
    """Questions with known answers, put to teacher and student side by side.

    `tokenizer` (byte, a folder, a tokenizer file) is by default that of the run's data. `context_window` is the number
    of tokens that a model reads at most, new ones included: a longer prompt keeps its end. By default the model's own
    limit, if it has one.
    """

    type: Literal["eval"] = Field(description="kind of the check")
    tokenizer: Annotated[str | None, BeforeValidator(_tokenizer_name)] = Field(
        default=None,
        description="byte, a folder or a tokenizer file; {type: tiktoken, encoding: NAME} is the file NAME.tiktoken; "
        "unset: the one of the data",
    )
    max_new_tokens: Positive = Field(default=16, description="most new tokens of an answer")
    context_window: Positive | None = Field(
        default=None,
        description="most tokens that a model reads, new ones included; unset: the limit of the model",
    )
    cases: Annotated[tuple[EvalCase, ...], Field(min_length=1)] = Field(description="questions with known answers")
    thresholds: EvalThresholds = Field(default=EvalThresholds(), description="accuracy that the student has to reach")
    fail_fast: bool = Field(default=False, description=FAIL_FAST)

    @model_validator(mode="after")
    def _rules(self) -> EvalVerifyConfig:
        ids = [case.id for case in self.cases]
        twice = next((name for name in ids if ids.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two cases have the id {quote(twice)}; give each its own")
        present = {case.kind for case in self.cases}
        for kind in KINDS:
            if kind not in present and getattr(self.thresholds, kind).is_set:
                raise ValueError(f"thresholds.{kind} is set, and no case is of that kind; remove it")
        if self.context_window is not None and self.context_window <= self.max_new_tokens:
            raise ValueError(
                f"context_window={self.context_window} leaves no room for a prompt before max_new_tokens="
                f"{self.max_new_tokens}; raise it"
            )
        return self


class L1Bounds(Config):
    """Largest mean and largest maximum absolute difference that pass."""

    max_mean_l1: NonNegativeFloat | None = Field(
        default=None, description="largest mean absolute difference that passes; unset: no bound"
    )
    max_max_l1: NonNegativeFloat | None = Field(
        default=None, description="largest absolute difference that passes; unset: no bound"
    )


class CompareVerifyConfig(Config):
    """L1 distance of attention outputs (B, T, M), by layer, and of logits (B, T, V), on held-out batches."""

    type: Literal["compare"] = Field(description="kind of the check")
    batches: Positive = Field(default=2, description="number of held-out batches")
    batch_size: Positive = Field(default=4, description="sequences of a batch")
    block_size: Positive = Field(default=256, description="tokens of a sequence")
    attention: L1Bounds = Field(default=L1Bounds(), description="bounds on attention outputs")
    logits: L1Bounds = Field(default=L1Bounds(), description="bounds on logits")
    fail_fast: bool = Field(default=False, description=FAIL_FAST)


class FidelityVerifyConfig(Config):
    """Held-out loss and agreement: delta = student NLL - teacher NLL, ratio = student over teacher perplexity.

    Ratio, KL(teacher || student) and the share of equal likeliest tokens are recorded by position in the window too.
    """

    type: Literal["fidelity"] = Field(description="kind of the check")
    batches: Positive = Field(default=5, description="number of batches")
    batch_size: Positive = Field(default=8, description="sequences of a batch")
    block_size: Positive = Field(
        default=256,
        description="tokens of a sequence; unset, the longest window that a run trains on, at least 256",
    )
    split: Literal["auto", "train", "val"] = Field(
        default="auto", description="data to measure on: train, val, or auto (val if there is one)"
    )
    texts: tuple[Text, ...] = Field(
        default=(),
        description="other texts to measure on too: python (source of the standard library), spaced (the held-out text "
        "with spaces around punctuation), a token folder or file, or a UTF-8 text file",
    )
    max_delta_nll: float | None = Field(
        default=None,
        description="largest rise of the loss over the teacher, in nats per token; unset: no bound",
    )
    max_ppl_ratio: PositiveFloat | None = Field(
        default=None, description="largest ratio of perplexities, student / teacher; unset: no bound"
    )
    max_kl: NonNegativeFloat | None = Field(
        default=None, description="largest KL(teacher || student) that passes, in nats per token"
    )
    min_top1_agreement: UnitInterval | None = Field(
        default=None, description="least share of tokens whose likeliest next token is the teacher's"
    )
    fail_fast: bool = Field(default=False, description=FAIL_FAST)


class KVCacheVerifyConfig(Config):
    """Bytes per token of both caches, counted from tensors that a prompt of `tokens` tokens filled.

    A quantised format counts what a token takes once it is out of the 16-bit tail, scales and padding included.
    The student's have to be those of the plan, at most `max_bytes_per_token`, and `min_ratio` times fewer than the
    teacher's (ratio = teacher bytes / student bytes).
    """

    type: Literal["kvcache"] = Field(description="kind of the check")
    kind: NamedCacheKind = Field(default=KVCacheKind.FP16, description="format of the KV cache")
    tokens: Positive = Field(default=64, description="tokens of the prompt that fills the caches")
    max_bytes_per_token: PositiveFloat | None = Field(
        default=None, description="most cache bytes per token of the student; unset: no bound"
    )
    min_ratio: PositiveFloat | None = Field(
        default=None, description="lowest ratio of teacher bytes to student bytes; unset: no bound"
    )
    fail_fast: bool = Field(default=False, description=FAIL_FAST)


VerifyConfig = Annotated[
    CompareVerifyConfig | FidelityVerifyConfig | EvalVerifyConfig | KVCacheVerifyConfig,
    Field(discriminator="type"),
    OrExtension(OwnCheckConfig),
]
