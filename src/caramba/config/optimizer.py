"""Schema of what one optimiser step does: its defaults by name, and which settings go together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from caramba.config.base import Config
from caramba.config.extension import name_of

if TYPE_CHECKING:
    from caramba.config.train import PhaseConfig

NonNegative = Annotated[float, Field(ge=0)]
BETAS = (0.9, 0.95)
LION_BETAS = (0.9, 0.99)  # Chen et al., 2023, arXiv:2302.06675
MOMENTUM = {"sgd": 0.9, "muon": 0.95}
# The rates of `lr: auto` are AdamW's. Muon's updates are scaled to the size of AdamW's, so they hold for it as well.
LR_HINTS = {
    "lion": "lr, 3 to 10 times smaller than AdamW's",
    "sgd": "lr, which depends on the size of the gradients",
    "pidao": "lr, whose square scales the gradient",
    "adafactor": "lr, the most that a weight may change by relative to its size: 1e-2 is usual",
}


class AdaGCConfig(Config):
    """Clip each tensor's gradient at `relative` times the average of its own norms after clipping; see `AdaGC`.

    `gradient_clip_algorithm: adagc` takes these; `max_grad_norm` holds for all gradients together until `warmup_steps`.
    """

    beta: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.98, description="decay of the moving average of a tensor's gradient norm"
    )
    relative: Annotated[float, Field(ge=1)] = Field(
        default=1.05, description="multiple of that average at which a gradient is clipped"
    )
    warmup_steps: Annotated[int, Field(ge=1)] = Field(
        default=100, description="steps in which max_grad_norm clips all gradients together instead"
    )


class SwatsConfig(Config):
    """When `optimizer: swats` goes from Adam to SGD; see `SWATS`."""

    tolerance: Annotated[float, Field(gt=0)] = Field(
        default=1e-9,
        description="distance between the SGD rate of a step and its average at which SGD takes over; the paper's 1e-9 "
        "is met by few runs",
    )


class PidaoConfig(Config):
    """Coefficients of `optimizer: pidao` and `pidao_adaptive`; see `PIDAO`."""

    kp: NonNegative = Field(default=25.0, description="weight of the gradient")
    ki: NonNegative = Field(default=1.0, description="weight of the gradient's integral")
    kd: NonNegative = Field(default=0.5, description="weight of the gradient's change")
    damping: Annotated[float, Field(gt=0)] = Field(
        default=25.0, description="friction; a velocity is forgotten in 1 / (damping lr) steps"
    )

    @model_validator(mode="after")
    def _is_stable(self) -> PidaoConfig:
        if self.ki >= self.damping * self.kp:
            raise ValueError(
                f"ki={self.ki:g} reaches damping * kp = {self.damping * self.kp:g}, from where a minimum repels; "
                "lower ki, or raise damping"
            )
        return self


def optimizer_conflicts(phase: PhaseConfig) -> Iterator[str]:
    """Yield what is wrong with a phase's optimiser, schedule and clipping taken together."""
    name = name_of(phase.optimizer)
    if name in LR_HINTS and phase.lr == "auto":
        yield f"lr=auto uses AdamW's published rates, got optimizer={name}; give {LR_HINTS[name]}"
    for key, owners in (("swats", ("swats",)), ("pidao", ("pidao", "pidao_adaptive"))):
        if getattr(phase, key) is not None and name not in owners:
            yield f"{key} belongs to optimizer={' or '.join(owners)}, got optimizer={name}; remove it"
    if name == "swats" and (phase.master_weights or phase.stochastic_rounding or phase.optimizer_offload):
        yield (
            "optimizer=swats decides for all weights together, and master_weights, stochastic_rounding and "
            "optimizer_offload step some at a time; remove them"
        )
    if name in ("sgd", "adafactor", "pidao") and phase.betas != BETAS:
        yield f"betas belongs to optimizer=adamw, lion, muon, swats or pidao_adaptive, got optimizer={name}; remove it"
    if phase.momentum is not None and name not in MOMENTUM:
        yield f"momentum belongs to optimizer={' or '.join(MOMENTUM)}, got optimizer={name}; remove it"
    if not phase.fused_optimizer and name not in ("adamw", "sgd"):
        yield f"fused_optimizer=false belongs to optimizer=adamw or sgd, got optimizer={name}; remove it"
    if (phase.lr_scaling == "none") != (phase.lr_base_batch is None):
        yield (
            f"lr_scaling={phase.lr_scaling} and lr_base_batch={phase.lr_base_batch}: a scaled lr needs the sequences "
            "of a step that lr is for, and nothing else does; give both, or neither"
        )
    if phase.adagc is not None and phase.gradient_clip_algorithm != "adagc":
        yield (
            f"adagc belongs to gradient_clip_algorithm=adagc, got {phase.gradient_clip_algorithm}; remove it"
        )
    if phase.gradient_clip_algorithm == "value" and phase.max_grad_norm is None:
        yield (
            "gradient_clip_algorithm=value clips every element at gradient_clip, got null; give it, or use norm"
        )


def precision_conflicts(phase: PhaseConfig) -> Iterator[str]:
    """Yield what is wrong with a phase's precision taken together."""
    is_16_bit = phase.dtype in ("bfloat16", "float16")
    if phase.use_amp is False and phase.dtype == "float16":
        yield (
            "dtype=float16 with use_amp=false would hold weights in float16, which loses updates below 6e-8; "
            "remove use_amp, or use dtype=bfloat16"
        )
    if is_16_bit and phase.amp_dtype not in ("auto", phase.dtype):
        yield f"dtype={phase.dtype} and amp_dtype={phase.amp_dtype} are two; remove one of them"
    if phase.use_amp is False and phase.amp_dtype != "auto":
        yield f"amp_dtype={phase.amp_dtype} needs autocast, which use_amp=false forbids; remove one of the two"
    if phase.has_16_bit_weights and (phase.phase not in ("pretrain", "global") or phase.lora is not None):
        yield (
            "dtype=bfloat16 with use_amp=false holds all weights in bfloat16, and this phase does not train all of "
            "them, so that the others would be rounded for nothing; remove use_amp"
        )
    for key in ("master_weights", "stochastic_rounding"):
        if getattr(phase, key) and not phase.has_16_bit_weights:
            yield (
                f"{key} belongs to weights in bfloat16, got dtype={phase.dtype}, use_amp={phase.use_amp}; "
                "use dtype=bfloat16 use_amp=false, or remove it"
            )
    if phase.float8 != "none" and "bfloat16" not in (phase.dtype, phase.amp_dtype) and phase.dtype != "auto":
        yield f"float8 is of products in bfloat16, got dtype={phase.dtype}; use dtype=bfloat16, or remove float8"
    if phase.optimizer_offload and (phase.stochastic_rounding or "float16" in (phase.dtype, phase.amp_dtype)):
        yield (
            "optimizer_offload keeps float32 weights on the host, which stochastic_rounding does without, and knows no "
            "scaled loss of float16; use bfloat16 or float32 without stochastic_rounding, or remove it"
        )
    if phase.master_weights == "in_moments" and (
        name_of(phase.optimizer) != "adamw" or not phase.fused_optimizer
    ):
        yield (
            f"master_weights=in_moments is of the moments of fused AdamW, got optimizer={name_of(phase.optimizer)}, "
            f"fused_optimizer={str(phase.fused_optimizer).lower()}; use master_weights=true"
        )
    if phase.master_weights == "in_moments" and phase.optimizer_offload:
        yield (
            "master_weights=in_moments needs no float32 weights, which optimizer_offload keeps on the host; "
            "remove one of the two"
        )
    if phase.master_weights and phase.stochastic_rounding:
        yield "master_weights keeps what stochastic_rounding would spread over steps; remove one of the two"
