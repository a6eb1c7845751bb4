"""Schema of what one optimiser step does, and of strategies: its defaults by name, and which settings go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, NonNegativeFloat, PositiveFloat, model_validator
from pydantic_core import PydanticCustomError

from caramba.config.base import Config, Probability, nearest
from caramba.config.extension import name_of
from caramba.config.source import is_mapping, is_sequence

if TYPE_CHECKING:
    from caramba.config.train import PhaseConfig


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

    beta: Probability = Field(default=0.98, description="decay of the moving average of a tensor's gradient norm")
    relative: Annotated[float, Field(ge=1)] = Field(
        default=1.05, description="multiple of that average at which a gradient is clipped"
    )
    warmup_steps: Annotated[int, Field(ge=1)] = Field(
        default=100, description="steps in which max_grad_norm clips all gradients together instead"
    )


class SwatsConfig(Config):
    """When `optimizer: swats` goes from Adam to SGD; see `SWATS`."""

    tolerance: PositiveFloat = Field(
        default=1e-9,
        description="distance between the SGD rate of a step and its average at which SGD takes over; the paper's 1e-9 "
        "is met by few runs",
    )


class PidaoConfig(Config):
    """Coefficients of `optimizer: pidao` and `pidao_adaptive`; see `PIDAO`."""

    kp: NonNegativeFloat = Field(default=25.0, description="weight of the gradient")
    ki: NonNegativeFloat = Field(default=1.0, description="weight of the gradient's integral")
    kd: NonNegativeFloat = Field(default=0.5, description="weight of the gradient's change")
    damping: PositiveFloat = Field(
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
    if phase.lora is not None and phase.lr_mult:
        yield "lora trains updates alone, whose lr is one, got lr_mult; remove one of the two"
    if name == "swats" and phase.lr_mult:
        yield "optimizer=swats finds one rate for all weights, got lr_mult; remove lr_mult, or use adamw"
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
        yield (f"adagc belongs to gradient_clip_algorithm=adagc, got {phase.gradient_clip_algorithm}; remove it")
    if phase.gradient_clip_algorithm == "value" and phase.max_grad_norm is None:
        yield ("gradient_clip_algorithm=value clips every element at gradient_clip, got null; give it, or use norm")


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
    if phase.master_weights == "in_moments" and (name_of(phase.optimizer) != "adamw" or not phase.fused_optimizer):
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


MATCHED = "matched"
STATES = {"adamw": 2, "sgd": 1, "lion": 1, "muon": 1, "swats": 2, "pidao": 2, "pidao_adaptive": 3}
"""Values that each optimiser keeps of a weight."""
SECOND_MOMENTS = ("adamw", "muon", "swats", "pidao_adaptive")
"""Optimisers that step by second moments; muon has AdamW for what is no matrix of the stack."""


class StrategyConfig(Config):
    """How to step: an optimiser, its rate relative to `lr`, its moments, weight decay and clipping."""

    optimizer: Literal["adamw", "sgd", "lion", "muon", "swats", "pidao", "pidao_adaptive"] = Field(
        description="optimiser of the strategy"
    )
    rate: PositiveFloat | Literal["matched"] = Field(
        description="multiple of the schedule's lr; matched keeps the update size of the strategy before"
    )
    betas: tuple[Probability, Probability] | None = Field(
        default=None, description="decays of the moments; unset: the phase's, lion's own"
    )
    momentum: Probability | None = Field(default=None, description="of sgd, 0.9, and muon, 0.95")
    decay: NonNegativeFloat = Field(default=1.0, description="multiple of weight_decay")
    clip: Literal["phase", "adagc"] = Field(
        default="phase", description="clipping of the phase, or each tensor by its own past norms"
    )
    swats: SwatsConfig | None = Field(default=None, description="keys of swats; unset: its defaults")
    pidao: PidaoConfig | None = Field(default=None, description="coefficients of pidao; unset: its defaults")


STRATEGIES: Mapping[str, StrategyConfig] = {
    "conservative_adamw": StrategyConfig(optimizer="adamw", rate=1.0),
    "aggressive_adamw": StrategyConfig(optimizer="adamw", rate=2.0),
    "spike_resistant": StrategyConfig(optimizer="adamw", rate=1.0, clip="adagc"),
    "sgd_escape": StrategyConfig(optimizer="sgd", rate=MATCHED, momentum=0.9),
    "lion": StrategyConfig(optimizer="lion", rate=0.2, betas=(0.9, 0.99), decay=1.0),
    # Its updates are the size of AdamW's, but its best rates are 4 to 8 times AdamW's best (docs/orchestrator.md).
    "muon": StrategyConfig(optimizer="muon", rate=4.0),
    "swats": StrategyConfig(optimizer="swats", rate=1.0, swats=SwatsConfig(tolerance=1e-5)),
    "pidao": StrategyConfig(optimizer="pidao", rate=MATCHED),
    "pidao_adaptive": StrategyConfig(optimizer="pidao_adaptive", rate=1.0),
}
DEFAULT_STRATEGIES = ("conservative_adamw", "muon")
"""More challengers are halved by shorter trials first, which favour small rates over what is ahead later."""
FIRST_DECISION = 40
"""Steps before the first decision, where the interval is longer: what is gained early is gained for the whole run."""


def strategies_by_name(value: Any) -> Any:
    """Return a list of built-in names as a mapping from name to strategy; a mapping may leave built-in ones empty.

    Raises:
        PydanticCustomError: a name that is no built-in strategy and has no data.
    """
    if is_sequence(value) and not isinstance(value, str):
        value = dict.fromkeys(map(str, value))
    if not is_mapping(value):
        return value
    found: dict[str, Any] = {}
    for name, data in value.items():
        if data is None and name not in STRATEGIES:
            known = ", ".join(STRATEGIES)
            raise PydanticCustomError(
                "strategy",
                "unknown strategy '{name}'{hint}; known: {known}; or give its data, {{optimizer: adamw, rate: 1}}",
                {"name": str(name), "hint": nearest(name, STRATEGIES), "known": known},
            )
        found[name] = STRATEGIES[name] if data is None else data
    return found


Strategies = Annotated[dict[str, StrategyConfig], BeforeValidator(strategies_by_name)]


def keys_of(phase: PhaseConfig) -> Iterator[str]:
    """Yield the keys of the orchestrator that a phase sets away from their defaults, but for the switch itself."""
    for key, field in type(phase).model_fields.items():
        if key.startswith("orchestrator_") and key != "orchestrator_enabled":
            default = field.get_default(call_default_factory=True)
            if getattr(phase, key) != default:
                yield key


def orchestrator_conflicts(phase: PhaseConfig) -> Iterator[str]:
    """Yield what is wrong with the orchestrator's keys taken together, and with the phase around them."""
    if not phase.orchestrator_enabled:
        for key in keys_of(phase):
            yield f"{key} belongs to orchestrator_enabled=true; add that, or remove {key}"
        return
    if phase.phase not in ("pretrain", "global"):
        yield f"orchestrator_enabled belongs to phase=pretrain or global, got phase={phase.phase}; remove it"
    if phase.optimizer != "adamw" or phase.gradient_clip_algorithm == "adagc":
        yield (
            f"orchestrator_enabled chooses optimiser and clipping by strategy, got optimizer={phase.optimizer}, "
            f"gradient_clip_algorithm={phase.gradient_clip_algorithm}; remove them, and use orchestrator_strategies"
        )
    if phase.lr_mult:
        yield "orchestrator_enabled sets the rates of strategies, got lr_mult; remove one of the two"
    for key in ("master_weights", "stochastic_rounding", "optimizer_offload"):
        if getattr(phase, key):
            yield f"orchestrator_enabled steps the weights themselves, got {key}; remove one of the two"
    strategies = phase.orchestrator_strategies
    for key in ("orchestrator_initial_strategy", "orchestrator_safety_strategy"):
        name = getattr(phase, key)
        if name is not None and name not in strategies:
            known = ", ".join(strategies)
            yield f"{key}={name} is none of orchestrator_strategies, {known}{nearest(name, strategies)}"
    first = strategies.get(phase.orchestrator_initial_strategy)
    if first is not None and first.rate == MATCHED:
        yield (
            f"orchestrator_initial_strategy={phase.orchestrator_initial_strategy} has rate=matched and nothing before "
            "it to match; give the strategy a rate, such as rate: 1"
        )
    if phase.orchestrator_decision_interval >= phase.steps:
        yield (
            f"orchestrator_decision_interval={phase.orchestrator_decision_interval} leaves no decision in "
            f"steps={phase.steps}; use {max(1, phase.steps // 4)} or less"
        )
    if (phase.orchestrator_policy == "replay") != (phase.orchestrator_decisions is not None):
        yield (
            "orchestrator_policy=replay follows the decisions of a file, and nothing else does; give both "
            "orchestrator_policy=replay and orchestrator_decisions=FILE, or neither"
        )
    if runs_trials(phase):
        cost, most = trial_steps(phase), phase.orchestrator_budget * phase.steps
        if cost > most:
            yield (
                f"orchestrator_budget={phase.orchestrator_budget:g} of steps={phase.steps} is {most:.0f} steps, and "
                f"one decision takes {cost}; raise the budget to {cost / phase.steps:.3f}, or lower "
                "orchestrator_eval_horizon or orchestrator_repeats"
            )


def runs_trials(phase: PhaseConfig) -> bool:
    """Whether a phase has something to choose from, and measures."""
    return (
        phase.orchestrator_enabled
        and phase.orchestrator_mode == "active"
        and phase.orchestrator_policy != "replay"
        and (len(phase.orchestrator_strategies) > 1 or phase.orchestrator_use_nowcasting)
    )


def first_decision(phase: PhaseConfig) -> int:
    """Return the step of a phase's first decision: soon, but not while its rate is still that of the warm-up."""
    return min(phase.orchestrator_decision_interval, max(FIRST_DECISION, phase.warmup_steps))


def halving_rungs(challengers: int, horizon: int) -> list[tuple[int, int]]:
    """Return (arms, steps of each) of the rungs that leave one challenger, the last at half of the horizon."""
    arms: list[int] = []
    while challengers > 1:
        arms.append(challengers)
        challengers //= 2
    return [(n, max(1, horizon >> (len(arms) - at))) for at, n in enumerate(arms)]


def trial_steps(phase: PhaseConfig, challengers: int | None = None) -> int:
    """Return the steps that a decision among `challengers` (all by default) takes: rungs, then two at the horizon."""
    horizon, repeats = phase.orchestrator_eval_horizon, phase.orchestrator_repeats
    n = len(phase.orchestrator_strategies) - 1 if challengers is None else challengers
    rungs = halving_rungs(n, horizon) if phase.orchestrator_policy == "halving" else []
    pairs = (n > 0) + phase.orchestrator_use_nowcasting
    return sum(arms * steps for arms, steps in rungs) + 2 * repeats * horizon * pairs


def portfolio_bytes(phase: PhaseConfig, weights: int) -> dict[str, int]:
    """Return bytes in float32 of `weights` trained weights: the states in use, and a copy for trials and rollback."""
    used = phase.orchestrator_strategies.values()
    if phase.orchestrator_mode == "monitor":
        used = [phase.orchestrator_strategies[phase.orchestrator_initial_strategy]]
    needs_v = any(one.optimizer in SECOND_MOMENTS for one in used)
    most = max(
        STATES[one.optimizer]
        + (1 if needs_v and one.optimizer in ("sgd", "lion", "muon") else 0)
        + (2 if one.optimizer == "pidao" else 0)
        for one in used
    )
    # Two snapshots, and the weights before and after a step with their difference.
    return {"states": 4 * most * weights, "copies": 4 * (2 * (1 + most) + 3) * weights}
