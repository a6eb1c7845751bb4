"""Schema of training: what one phase does, and the group of phases that a `train` option names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from caramba.config.base import Config, Later
from caramba.config.layer import Positive

PhaseName = Literal["pretrain", "blockwise", "drift", "global"]
NonNegative = Annotated[float, Field(ge=0.0)]
PLANNING = "the runtime planning work"


def _compile_mode(value: Any) -> Any:
    return {"none": False, "off": False}.get(value, value) if isinstance(value, str) else value


def _checkpointing(value: Any) -> Any:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


class ConvergenceConfig(Config):
    """Stop training a block when its smoothed loss reaches `target`, or after `max_steps`."""

    target: Annotated[float, Field(gt=0)]
    patience: Positive = 50
    max_steps: Positive | None = None


class PhaseConfig(Config):
    """One phase of training. Every key may also be given at `train.KEY`, where it holds for all phases.

    `steps` counts optimiser steps; a step sees batch_size * block_size * gradient_accumulation_steps tokens.
    """

    aliases: ClassVar[dict[str, str]] = {
        "seq_len": "block_size",
        "ctx_len": "block_size",
        "accumulate": "gradient_accumulation_steps",
        "gradient_clip": "max_grad_norm",
        "compile": "compile_model",
        "use_gradient_checkpointing": "activation_checkpointing",
    }

    phase: Annotated[PhaseName, Later("the surgery work", "drift")]
    trains: Literal["teacher", "student"] | None = None
    control: bool = Field(
        default=False,
        description="train the teacher further on the tokens of the student's phases, beside the comparison",
    )
    objective: Annotated[Literal["ce", "kl", "mixed"], Later("the surgery work", "mixed")] = "ce"
    steps: Positive
    batch_size: Annotated[Positive | Literal["auto"], Later(PLANNING, "auto")] = 16
    block_size: Positive = 256
    lr: Annotated[float, Field(gt=0)] = 3e-4
    optimizer: Annotated[
        Literal["adamw", "sgd", "adafactor", "lion", "muon"],
        Later("the training speed work", "sgd", "adafactor", "lion", "muon"),
    ] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    scheduler: Annotated[
        Literal["none", "constant", "linear", "cosine", "wsd"], Later("the training speed work", "wsd")
    ] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight_decay: NonNegative = 0.0
    gradient_accumulation_steps: Positive = 1
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    temperature: Annotated[float, Field(gt=0)] = 1.0
    seed: int | None = None
    save_every: Positive | None = None
    eval_every: Positive | None = None
    schedule: Annotated[Literal["concurrent", "sequential"], Later("the surgery work", "sequential")] = (
        "concurrent"
    )
    convergence: Annotated[ConvergenceConfig | None, Later("the surgery work")] = None
    attention_kl: Annotated[NonNegative, Later("the surgery work")] = 0.0
    cache_teacher_outputs: Annotated[bool, Later("the surgery work")] = False
    device: Literal["auto", "cpu", "cuda", "mps"] | None = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], Later(PLANNING, "bfloat16", "float16")
    ] = "auto"
    use_amp: Annotated[bool | Literal["auto"], Later(PLANNING, True)] = "auto"
    amp_dtype: Annotated[Literal["auto", "bfloat16", "float16"], Later(PLANNING, "bfloat16", "float16")] = (
        "auto"
    )
    compile_model: Annotated[
        bool | Literal["auto", "default", "reduce-overhead", "max-autotune"],
        BeforeValidator(_compile_mode),
        Later(PLANNING, True, "auto", "default", "reduce-overhead", "max-autotune"),
    ] = False
    activation_checkpointing: Annotated[
        Literal["none", "selective", "full"],
        BeforeValidator(_checkpointing),
        Later(PLANNING, "selective", "full"),
    ] = "none"
    activation_checkpoint_threshold: Annotated[float | None, Later(PLANNING)] = None
    activation_checkpoint_granularity: Annotated[Literal["layer", "block"], Later(PLANNING, "layer")] = (
        "block"
    )
    num_workers: Annotated[int, Field(ge=0)] = 0
    pin_memory: bool | None = None
    orchestrator_enabled: Annotated[bool, Later("the optimiser work")] = False
    orchestrator_decision_interval: Annotated[Positive | None, Later("the optimiser work")] = None
    orchestrator_initial_strategy: Annotated[str | None, Later("the optimiser work")] = None

    @model_validator(mode="after")
    def _rules(self) -> PhaseConfig:
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} exceeds steps={self.steps}; use {self.steps} or fewer"
            )
        if self.convergence is not None and self.phase != "blockwise":
            raise ValueError(f"convergence belongs to the blockwise phase, got phase={self.phase}; remove it")
        if self.objective != "ce" and self.phase in ("pretrain", "blockwise"):
            raise ValueError(
                f"phase={self.phase} has a loss of its own, got objective={self.objective}; remove it, or use global"
            )
        if self.control and (self.phase != "pretrain" or self.trains == "student"):
            raise ValueError("a control trains the teacher further: use phase: pretrain, trains: teacher")
        if self.temperature != 1.0 and self.objective != "kl":
            raise ValueError(
                f"temperature belongs to objective=kl, got objective={self.objective}; remove it"
            )
        if self.phase != "pretrain" and self.trains == "teacher":
            raise ValueError(
                f"phase={self.phase} trains the student, got trains=teacher; only pretrain may train the teacher"
            )
        return self

    @property
    def tokens(self) -> int:
        """Tokens that this phase trains on, one process."""
        assert isinstance(self.batch_size, int)
        return self.steps * self.batch_size * self.block_size * self.gradient_accumulation_steps
