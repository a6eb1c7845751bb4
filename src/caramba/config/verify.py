"""Schema of the checks that compare a student with its teacher after training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from caramba.config.base import Config
from caramba.config.benchmark import NOBODYS_CHOICE
from caramba.config.eval_cases import EvalVerifyConfig
from caramba.config.kvcache import CacheKind, KVCacheKind
from caramba.config.layer import Positive

Bound = Annotated[float, Field(ge=0)]


class L1Bounds(Config):
    """Largest mean and largest maximum absolute difference that pass."""

    max_mean_l1: Bound | None = None
    max_max_l1: Bound | None = None


class CompareVerifyConfig(Config):
    """L1 distance of attention outputs (B, T, M), by layer, and of logits (B, T, V), on held-out batches."""

    type: Literal["compare"]
    batches: Positive = 2
    batch_size: Positive = 4
    block_size: Positive = 256
    attention: L1Bounds = L1Bounds()
    logits: L1Bounds = L1Bounds()
    fail_fast: bool = False


class FidelityVerifyConfig(Config):
    """Held-out loss and agreement: delta = student NLL - teacher NLL, ratio = student over teacher perplexity.

    Ratio, KL(teacher || student) and the share of equal likeliest tokens are recorded by position in the window too.
    """

    type: Literal["fidelity"]
    batches: Positive = 5
    batch_size: Positive = 8
    block_size: Positive = 256
    split: Literal["auto", "train", "val"] = "auto"
    max_delta_nll: float | None = None
    max_ppl_ratio: Annotated[float, Field(gt=0)] | None = None
    max_kl: Bound | None = Field(
        default=None, description="largest KL(teacher || student) that passes, in nats per token"
    )
    min_top1_agreement: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="least share of tokens whose likeliest next token is the teacher's"
    )
    fail_fast: bool = False


class KVCacheVerifyConfig(Config):
    """Bytes per token of both caches, counted from tensors that a prompt of `tokens` tokens filled.

    A quantised format counts what a token takes once it is out of the 16-bit tail, scales and padding included.
    The student's have to be those of the plan, at most `max_bytes_per_token`, and `min_ratio` times fewer than the
    teacher's (ratio = teacher bytes / student bytes).
    """

    type: Literal["kvcache"]
    kind: Annotated[CacheKind, NOBODYS_CHOICE] = KVCacheKind.FP16
    tokens: Positive = 64
    max_bytes_per_token: Annotated[float, Field(gt=0)] | None = None
    min_ratio: Annotated[float, Field(gt=0)] | None = None
    fail_fast: bool = False


VerifyConfig = Annotated[
    CompareVerifyConfig | FidelityVerifyConfig | EvalVerifyConfig | KVCacheVerifyConfig,
    Field(discriminator="type"),
]
