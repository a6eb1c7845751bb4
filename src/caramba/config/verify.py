"""Schema of the checks that compare a student with its teacher after training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from caramba.config.base import Config
from caramba.config.benchmark import NOBODYS_CHOICE
from caramba.config.eval_cases import FAIL_FAST, EvalVerifyConfig
from caramba.config.kvcache import CacheKind, KVCacheKind
from caramba.config.layer import Positive

Bound = Annotated[float, Field(ge=0)]


class L1Bounds(Config):
    """Largest mean and largest maximum absolute difference that pass."""

    max_mean_l1: Bound | None = Field(
        default=None, description="largest mean absolute difference that passes; unset: no bound"
    )
    max_max_l1: Bound | None = Field(
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
    max_delta_nll: float | None = Field(
        default=None,
        description="largest rise of the loss over the teacher, in nats per token; unset: no bound",
    )
    max_ppl_ratio: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="largest ratio of perplexities, student / teacher; unset: no bound"
    )
    max_kl: Bound | None = Field(
        default=None, description="largest KL(teacher || student) that passes, in nats per token"
    )
    min_top1_agreement: Annotated[float, Field(ge=0, le=1)] | None = Field(
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
    kind: Annotated[CacheKind, NOBODYS_CHOICE] = Field(
        default=KVCacheKind.FP16, description="format of the KV cache"
    )
    tokens: Positive = Field(default=64, description="tokens of the prompt that fills the caches")
    max_bytes_per_token: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="most cache bytes per token of the student; unset: no bound"
    )
    min_ratio: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="lowest ratio of teacher bytes to student bytes; unset: no bound"
    )
    fail_fast: bool = Field(default=False, description=FAIL_FAST)


VerifyConfig = Annotated[
    CompareVerifyConfig | FidelityVerifyConfig | EvalVerifyConfig | KVCacheVerifyConfig,
    Field(discriminator="type"),
]
