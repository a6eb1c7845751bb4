"""Schema of training: what one phase does, and the group of phases that a `train` option names."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Collection
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    WithJsonSchema,
    model_validator,
)

from caramba.config.base import Config, PathText, Probability, Seed, Share, UnitInterval
from caramba.config.extension import Loss, NameOrExtension, OptimizerConfig, ScheduleConfig, name_of
from caramba.config.layer_base import Positive
from caramba.config.optimizer import (
    BETAS,
    DEFAULT_STRATEGIES,
    LION_BETAS,
    MOMENTUM,
    STRATEGIES,
    AdaGCConfig,
    PidaoConfig,
    Strategies,
    SwatsConfig,
    optimizer_conflicts,
    orchestrator_conflicts,
    precision_conflicts,
)
from caramba.config.source import is_mapping
from caramba.errors import ConfigError


def checkpointing_word(value: Any) -> Any:
    """Return the word that true and false stand for; what is no such thing comes back as it is."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


Checkpointing = Annotated[Literal["none", "selective", "full", "auto"], BeforeValidator(checkpointing_word)]
"""none keeps all, full the inputs of blocks, selective matrix products and attention; true is full, false none."""


PhaseName = Literal["pretrain", "blockwise", "drift", "global"]
BLOCK_PHASES = ("blockwise", "drift")
# The value of `lr: auto`: (rate at a width of 2048, as published for 1B models, power of 2048 / d_model). A student
# that is trained as a whole is near its teacher by then, and is thrown back by rates that serve fresh blocks.
AUTO_LR_WIDTH = 2048
AUTO_LR = {"pretrain": (3e-4, 1.0), "blockwise": (2e-4, 1.0), "drift": (1e-4, 1.0), "global": (8e-5, 0.5)}


def _compile_mode(value: Any) -> Any:
    return {"none": False, "off": False}.get(value, value) if isinstance(value, str) else value


class ConvergenceConfig(Config):
    """Freeze a block once its smoothed loss has stayed at `target` or below for `patience` steps, or after `max_steps`.

    A frozen block costs nothing more, and a phase whose blocks are all frozen ends early.
    """

    target: PositiveFloat = Field(description="smoothed loss of a block at which it may freeze")
    patience: Positive = Field(default=50, description="steps that the loss has to stay at the target")
    max_steps: Positive | None = Field(
        default=None, description="steps after which it freezes in any case; unset: none"
    )


class TeacherLogitsConfig(Config):
    """Teacher's distributions that are stored once and read in place of a forward, by every run that names `path`.

    A window that is not stored yet is computed and stored, so the first run of a sweep pays for the teacher. Bytes a
    token: 4 (top_k + tail_samples) + 4, or 6 for 4 with vocabularies above 65,536.
    """

    path: Annotated[str, Field(min_length=1)] = Field(description="folder of the store; made where missing")
    top_k: Positive = Field(default=64, description="likeliest entries of a token that are stored, in 16 bits")
    tail: bool = Field(
        default=True,
        description="store the exact mass of all other entries and samples of them; false: the top_k are renormalised",
    )
    tail_samples: Positive = Field(
        default=32, description="entries that are sampled from all others, which keep the loss unbiased"
    )


class MemoryResizeConfig(Config):
    """Give every MemoryBankLayer another number of slots before the first step of a phase.

    Fewer: the slots that training text reads most stay. More: new slots are empty.
    """

    slots: Positive = Field(description="slots per key/value head that the phase trains")
    select: Literal["read_mass"] = Field(
        default="read_mass", description="slots that stay: those with most probability of queries"
    )
    open: bool = Field(
        default=False,
        description="sample the gates of new slots as in a new model, so that they train; false: they write nothing, "
        "and logits stay as they are",
    )


class LoraConfig(Config):
    """Train low-rank updates W + (alpha / rank) B A of the `targets` linear layers; merged at the end.

    A target is the last part of a module's name (`q_sem`, `out`, `down`); `all-linear` is every linear layer but the
    head (Hu et al., 2021, arXiv:2106.09685).
    """

    rank: Positive = Field(default=16, description="rank of the updates")
    alpha: PositiveFloat = Field(default=32.0, description="scale of the updates is alpha / rank")
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        default=("all-linear",), description="last parts of module names to train, or all-linear"
    )
    dropout: Probability = Field(default=0.0, description="dropout probability of the input of an update")


OWN_KEYS = {
    "convergence": BLOCK_PHASES,
    "schedule": BLOCK_PHASES,
    "attention_kl": BLOCK_PHASES,
    "trainable": BLOCK_PHASES,
    "lora": ("global",),
    "teacher_logits": ("global",),
}


OPTIMIZERS = NameOrExtension(
    Literal["adamw", "sgd", "adafactor", "lion", "muon", "swats", "pidao", "pidao_adaptive"], OptimizerConfig
)
SCHEDULES = NameOrExtension(Literal["none", "constant", "linear", "cosine", "wsd"], ScheduleConfig)


NULL_BEFORE = ("orchestrator_decision_interval", "orchestrator_initial_strategy")


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

    phase: PhaseName = Field(
        description="pretrain, blockwise (each block alone), drift (blocks on the student's own inputs) or "
        "global (all at once)"
    )
    trains: Literal["teacher", "student", "variant"] | None = Field(
        default=None, description="variant is what a run with exp trains"
    )
    control: bool = Field(
        default=False,
        description="train the teacher further on the tokens of the student's phases, for comparison",
    )
    objective: Literal["ce", "kl", "mixed"] = Field(
        default="ce",
        description="ce (cross-entropy), kl (distillation) or mixed; only phase=global takes others than ce",
    )
    loss: Loss | None = Field(
        default=None, description="loss of a plugin in place of cross-entropy, {type: NAME}; unset: none"
    )
    kl_weight: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="share of the teacher's KL in objective=mixed; the rest is cross-entropy"
    )
    hidden_weight: NonNegativeFloat = Field(
        default=0.0,
        description="of the distance to the teacher's residual stream in objective=kl or mixed; falls to 0 over the "
        "phase",
    )
    steps: Positive = Field(description="number of optimiser steps")
    batch_size: Positive | Literal["auto"] = Field(
        default=16, description="auto: the most that fits memory_utilization, measured on the run's own step"
    )
    block_size: Positive = Field(default=256, description="tokens of a sequence")
    lr: PositiveFloat | Literal["auto"] = Field(
        default=3e-4,
        description="auto: the published rate of the phase at width 2048, more for a narrower model",
    )
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none",
        description="lr grows with batch_size * gradient_accumulation_steps / lr_base_batch, or with its square root",
    )
    lr_base_batch: Positive | None = Field(default=None, description="sequences of a step that lr is for")
    lr_mult: dict[str, NonNegativeFloat] = Field(
        default={},
        description="multiples of lr by pattern of parameter names, {'*slot_gate*': 10}; the last that matches holds, "
        "and 0 leaves weights as they are",
    )
    optimizer: Annotated[Any, BeforeValidator(OPTIMIZERS), WithJsonSchema(OPTIMIZERS.schema())] = Field(
        default="adamw",
        description="lion wants an lr 3 to 10 times smaller than AdamW's, and a weight_decay as many times larger; "
        "muon takes AdamW's, which also steps what is no matrix of the stack; swats goes from Adam to SGD; or one of a "
        "plugin, {type: NAME}",
    )
    fused_optimizer: bool = Field(
        default=True, description="one kernel for all weights; false steps adamw and sgd weight by weight"
    )
    betas: tuple[Probability, Probability] = Field(
        default=BETAS, description="0.9 and 0.99 where none are given for lion"
    )
    swats: SwatsConfig | None = Field(default=None, description="keys of swats; unset: its defaults")
    pidao: PidaoConfig | None = Field(
        default=None, description="coefficients of pidao and pidao_adaptive; unset: their defaults"
    )
    momentum: Probability | None = Field(default=None, description="of sgd, 0.9, and muon, 0.95")
    scheduler: Annotated[Any, BeforeValidator(SCHEDULES), WithJsonSchema(SCHEDULES.schema())] = Field(
        default="cosine",
        description="course of lr after the warm-up; none and constant are equal; or one of a plugin, {type: NAME}",
    )
    decay_ratio: Share = Field(default=0.2, description="share of the steps in which wsd decays, at the end")
    warmup_steps: NonNegativeInt = Field(default=0, description="steps in which lr rises from 0")
    min_lr_ratio: UnitInterval = Field(default=0.0, description="share of lr at the end")
    weight_decay: NonNegativeFloat = Field(default=0.0, description="decoupled weight decay")
    gradient_accumulation_steps: Positive = Field(default=1, description="forward and backward passes of a step")
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="of all gradients together; in blockwise and drift of each block's own"
    )
    gradient_clip_algorithm: Literal["norm", "value", "adagc"] = Field(
        default="norm",
        description="value clips every element at max_grad_norm; adagc each tensor by its own past norms",
    )
    adagc: AdaGCConfig | None = Field(default=None, description="keys of adagc clipping; unset: its defaults")
    nonfinite: Literal["stop", "skip"] = Field(
        default="stop",
        description="of a loss or gradient that is not finite: stop names the windows of the batch, skip leaves it out",
    )
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        default=None, description="save and evaluate an exponential moving average of the trained weights"
    )
    lora: LoraConfig | None = Field(
        default=None, description="train low-rank updates in phase=global; unset: all weights"
    )
    memory_resize: MemoryResizeConfig | None = Field(
        default=None, description="another number of memory slots from this phase on; unset: none"
    )
    temperature: PositiveFloat = Field(default=1.0, description="softmax temperature of kl and mixed")
    seed: Seed | None = Field(default=None, description="seed of this phase; unset: the seed of the run")
    save_every: Positive | None = Field(
        default=None, description="steps between checkpoints; unset: settings.save_every"
    )
    eval_every: Positive | None = Field(
        default=None, description="steps between validations; unset: settings.eval_iters"
    )
    schedule: Literal["concurrent", "sequential"] = Field(
        default="concurrent", description="order in which blocks train: all together, or one after another"
    )
    convergence: ConvergenceConfig | None = Field(default=None, description="when a block freezes early; unset: never")
    trainable: Literal["auto", "all", "maps"] = Field(
        default="auto",
        description="maps: a latent student's W_q and W_o, which surgery copies, stay as they are; auto: maps where "
        "surgery has copied them, else all",
    )
    attention_kl: NonNegativeFloat = Field(
        default=0.0, description="weight of KL(teacher || student) of attention probabilities"
    )
    attention_queries: Positive = Field(default=64, description="queries per sequence that attention_kl samples")
    vocab_chunk: Positive = Field(default=1024, description="tokens whose logits exist at one time")
    cross_entropy: Literal["chunked", "dense"] = Field(
        default="chunked", description="dense makes the logits of a whole batch at once, as a plain loop does"
    )
    cache_teacher_outputs: bool = Field(
        default=False, description="store the outputs of the teacher on disk and read them in each step"
    )
    teacher_cache_max_gb: PositiveFloat = Field(
        default=20.0, description="largest such store, in 1e9 bytes; a larger one is refused"
    )
    teacher_top_k: Positive = Field(default=64, description="logits per token that a cached global phase keeps")
    teacher_logits: TeacherLogitsConfig | None = Field(
        default=None,
        description="store of the teacher's logits that runs share; only phase=global with objective kl or mixed; "
        "unset: the teacher runs at every step",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] | None = Field(
        default=None, description="device of this phase: auto, cpu, cuda or mps; unset: the device of the run"
    )
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Field(
            description="of the computation; weights and optimiser are float32, unless bfloat16 goes with "
            "use_amp=false. auto: bfloat16 on GPUs that have it, which a phase that measures another key (batch_size="
            "auto, ...) holds against float32 at its own batch"
        ),
    ] = "auto"
    use_amp: bool | Literal["auto"] = Field(
        default="auto", description="16-bit autocast with float32 weights; auto: by dtype"
    )
    amp_dtype: Literal["auto", "bfloat16", "float16"] = Field(
        default="auto", description="float16 scales the loss, and skips steps whose gradients overflow"
    )
    master_weights: bool | Literal["in_moments"] = Field(
        default=False,
        description="bfloat16 weights are rounded from float32 ones that the optimiser steps; in_moments: whose other "
        "16 bits are the last ones of AdamW's moments, so that they take no memory",
    )
    stochastic_rounding: bool = Field(
        default=False, description="bfloat16 weights are rounded up or down at random after each step"
    )
    optimizer_offload: bool = Field(
        default=False,
        description="optimiser states and float32 weights are in the host's memory, and stepped there",
    )
    activation_offload: bool = Field(
        default=False, description="what a backward needs waits for it in the host's memory"
    )
    float8: Literal["none", "rowwise", "tensorwise", "rowwise_with_gw_hp"] = Field(
        default="none",
        description="matrix products of wide linear layers in float8, scaled by row, as whole tensors, or by row with "
        "gradients of weights from bfloat16 (torchao's recipes), on GPUs that have it",
    )
    float8_min_width: Positive = Field(
        default=1024,
        description="of the narrower side of such a layer, or of layers that a compiled step makes one product of",
    )
    tf32: bool = Field(default=False, description="float32 matrix products in TF32, on GPUs that have it")
    compile_model: Annotated[
        bool | Literal["auto", "default", "reduce-overhead", "max-autotune"],
        BeforeValidator(_compile_mode),
        Field(description="auto: what takes the least time over the run, compilation included, as measured"),
    ] = False
    activation_checkpointing: Checkpointing = Field(
        default="none", description="selective keeps matrix products and attention; auto: the least that fits"
    )
    activation_checkpoint_threshold: Share | None = Field(
        default=None,
        description="checkpoint only when a step without it takes more than this share of the memory",
    )
    activation_checkpoint_granularity: Literal["layer", "block"] = Field(
        default="block", description="what is recomputed at a time: a repeat of a list, or each node of it"
    )
    memory_utilization: Share = Field(
        default=0.9,
        description="share of the device's free memory that what is chosen by measurement may take",
    )
    num_workers: NonNegativeInt | Literal["auto"] = Field(
        default=0, description="processes that read data; auto: as many as keep the device from waiting"
    )
    pin_memory: bool | None = Field(default=None, description="page-locked batches; unset: on CUDA only")
    orchestrator_enabled: bool = Field(
        default=False,
        description="choose among optimiser strategies within the phase, by held-out loss; see docs/orchestrator.md",
    )
    orchestrator_mode: Literal["monitor", "active"] = Field(
        default="active", description="monitor records what it sees and changes nothing"
    )
    orchestrator_strategies: Strategies = Field(
        default={name: STRATEGIES[name] for name in DEFAULT_STRATEGIES},
        description="names of built-in strategies, or a mapping from name to {optimizer, rate, betas, momentum, decay, "
        "clip}",
    )
    orchestrator_initial_strategy: str = Field(default="conservative_adamw", description="strategy at the start")
    orchestrator_decision_interval: Positive = Field(
        default=500, description="optimiser steps between two decisions; the first comes after 40, or the warm-up"
    )
    orchestrator_policy: Literal["halving", "ucb", "replay"] = Field(
        default="halving",
        description="how trials are spent: halving tries all and halves them, ucb tries one challenger; replay follows "
        "orchestrator_decisions without trials",
    )
    orchestrator_decisions: PathText | None = Field(
        default=None, description="decisions.jsonl of an earlier run that replay follows"
    )
    orchestrator_eval_horizon: Positive = Field(default=32, description="steps of a trial")
    orchestrator_repeats: Annotated[int, Field(ge=2)] = Field(
        default=3,
        description="trials of a candidate on other batches, whose paired differences give the interval",
    )
    orchestrator_budget: Share = Field(default=0.2, description="tokens of trials, as a share of the phase's own")
    orchestrator_min_steps_between_switches: Positive = Field(
        default=500, description="steps after a switch in which no other is tried"
    )
    orchestrator_ramp_steps: NonNegativeInt = Field(
        default=50, description="steps in which the rate goes from the matched one to the strategy's own"
    )
    orchestrator_max_loss_increase: Annotated[float, Field(gt=1)] = Field(
        default=1.5, description="multiple of the recent median loss at which training rolls back"
    )
    orchestrator_safety_strategy: str | None = Field(
        default=None, description="strategy after a rollback; unset: the one in use stays"
    )
    orchestrator_use_nowcasting: bool = Field(
        default=False, description="try jumps to predicted weights at decisions, and keep those that help"
    )

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, value: Any) -> Any:
        """Leave out the nulls that manifests had for these keys before there was an orchestrator."""
        if not is_mapping(value):
            return value
        return {key: item for key, item in value.items() if item is not None or key not in NULL_BEFORE}

    @model_validator(mode="before")
    @classmethod
    def _lion_betas(cls, value: Any) -> Any:
        if is_mapping(value) and value.get("optimizer") == "lion":
            return {"betas": LION_BETAS, **value}
        return value

    @model_validator(mode="after")
    def _rules(self) -> PhaseConfig:
        for conflict in (
            *optimizer_conflicts(self),
            *precision_conflicts(self),
            *orchestrator_conflicts(self),
        ):
            raise ValueError(conflict)
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} exceeds steps={self.steps}; use {self.steps} or fewer")
        for key, phases in OWN_KEYS.items():
            if getattr(self, key) != type(self).model_fields[key].default and self.phase not in phases:
                raise ValueError(f"{key} belongs to phase={' or '.join(phases)}, got phase={self.phase}; remove it")
        if self.objective != "ce" and self.phase != "global":
            raise ValueError(
                f"phase={self.phase} has a loss of its own, got objective={self.objective}; remove it, or use global"
            )
        if self.activation_checkpoint_threshold is not None and self.activation_checkpointing == "none":
            raise ValueError(
                f"activation_checkpoint_threshold={self.activation_checkpoint_threshold:g} sets when to checkpoint, "
                "got activation_checkpointing=none; use selective, full or auto, or remove the threshold"
            )
        if self.control and (self.phase != "pretrain" or self.trains == "student"):
            raise ValueError("a control trains the teacher further: use phase: pretrain, trains: teacher")
        if self.temperature != 1.0 and self.objective == "ce":
            raise ValueError("temperature belongs to objective=kl or mixed, got objective=ce; remove it")
        if self.kl_weight != 0.5 and self.objective != "mixed":
            raise ValueError(f"kl_weight belongs to objective=mixed, got objective={self.objective}; remove it")
        if self.cross_entropy == "dense" and (self.phase in BLOCK_PHASES or self.objective != "ce"):
            raise ValueError(
                f"cross_entropy=dense is of a phase that reads the data alone, got phase={self.phase} with "
                f"objective={self.objective}; remove it"
            )
        if self.hidden_weight and (self.objective == "ce" or self.stores_teacher):
            store = "teacher_logits" if self.teacher_logits else "cache_teacher_outputs"
            raise ValueError(
                "hidden_weight compares every block of a teacher that runs along, got "
                + ("objective=ce" if self.objective == "ce" else f"{store}, which keeps logits")
                + "; remove one of the two"
            )
        if self.teacher_logits is not None and self.cache_teacher_outputs:
            raise ValueError(
                "teacher_logits and cache_teacher_outputs both store the teacher's logits; remove one of the two"
            )
        if self.teacher_logits is not None and not self.reads_teacher:
            raise ValueError(
                f"phase={self.phase} with objective={self.objective} reads no teacher; remove teacher_logits, or use "
                "objective=kl or mixed"
            )
        if self.cache_teacher_outputs and not self.reads_teacher:
            raise ValueError(
                f"phase={self.phase} with objective={self.objective} reads no teacher outputs; "
                "remove cache_teacher_outputs, or use objective=kl or mixed"
            )
        if self.loss is not None and (self.phase in BLOCK_PHASES or self.objective != "ce"):
            raise ValueError(
                f"loss={self.loss.type} replaces the cross-entropy of a phase that reads the data alone, got "
                f"phase={self.phase} with objective={self.objective}; remove it"
            )
        if self.phase != "pretrain" and self.trains == "teacher":
            raise ValueError(
                f"phase={self.phase} trains the student, got trains=teacher; only pretrain may train the teacher"
            )
        return self

    @property
    def reads_teacher(self) -> bool:
        """Whether each step needs the teacher's outputs."""
        return self.phase in BLOCK_PHASES or self.objective != "ce"

    @property
    def stores_teacher(self) -> bool:
        """Whether the teacher's outputs are stored by window and read again."""
        return self.cache_teacher_outputs or self.teacher_logits is not None

    @property
    def has_16_bit_weights(self) -> bool:
        """Whether weights themselves are bfloat16, in place of float32 under autocast."""
        return self.dtype == "bfloat16" and self.use_amp is False

    @property
    def optimizer_momentum(self) -> float:
        """`momentum`, or the optimiser's own where none is given; 0 for optimisers without one."""
        return MOMENTUM.get(name_of(self.optimizer), 0.0) if self.momentum is None else self.momentum

    @property
    def measured_keys(self) -> tuple[str, ...]:
        """The keys that a measurement on the machine decides, empty when the phase sets everything itself."""
        keys = ("batch_size", "compile_model", "num_workers")
        found = tuple(key for key in keys if getattr(self, key) == "auto")
        if self.phase in BLOCK_PHASES:  # whose step holds the graph of one block: nothing to checkpoint
            return found
        has_choice = self.activation_checkpointing == "auto" or self.activation_checkpoint_threshold is not None
        return (*found, "activation_checkpointing") if has_choice else found

    def learning_rate_at(self, d_model: int, ranks: int = 1) -> float:
        """Return `lr` times `lr_factor`.

        `auto` is the phase's published rate at width 2048 times (2048 / d_model)^power, power 1 for pretraining and
        blocks and 1/2 for a whole student.
        """
        rate, power = AUTO_LR[self.phase]
        lr = rate * (AUTO_LR_WIDTH / d_model) ** power if self.lr == "auto" else self.lr
        return lr * self.lr_factor(ranks)

    def lr_factor(self, ranks: int = 1) -> float:
        """What `lr_scaling` makes of lr: B / B_0 or its square root, B the sequences of a step, of all `ranks` that
        share the data; 1 while B is `auto`.

        Reference: Goyal et al., 2017, arXiv:1706.02677 (linear); Malladi et al., 2022, arXiv:2205.10287 (square root).
        """
        if self.lr_scaling == "none" or self.lr_base_batch is None or self.batch_size == "auto":
            return 1.0
        ratio = self.batch_size * self.gradient_accumulation_steps * ranks / self.lr_base_batch
        return ratio if self.lr_scaling == "linear" else math.sqrt(ratio)

    @property
    def tokens(self) -> int:
        """Tokens that this phase trains on, one process."""
        assert isinstance(self.batch_size, int)
        return self.steps * self.batch_size * self.block_size * self.gradient_accumulation_steps


CPU_PRECISIONS = ("float32", "bfloat16", "float16")


def dtype_of(phase: PhaseConfig, device_type: str, supported: Collection[str]) -> tuple[str, str]:
    """Return the dtype that a phase computes in on a device, and the reason.

    Args:
        phase: its dtype, use_amp and amp_dtype decide, `auto` by the device.
        device_type: `cpu`, `cuda` or `mps`.
        supported: the precisions that the device has.
    """
    if phase.use_amp is False:
        kept = "bfloat16" if phase.has_16_bit_weights else "float32"
        return kept, f"the manifest: use_amp=false{', dtype=bfloat16' if phase.has_16_bit_weights else ''}"
    if phase.use_amp is True:
        asked = next((name for name in (phase.amp_dtype, phase.dtype) if name.endswith("16")), "bfloat16")
        return asked, f"the manifest: use_amp=true{'' if asked == 'bfloat16' else f', {asked}'}"
    if phase.dtype != "auto":
        return phase.dtype, f"the manifest: dtype={phase.dtype}"
    if phase.amp_dtype != "auto" and device_type == "cuda":
        return phase.amp_dtype, f"the manifest: amp_dtype={phase.amp_dtype}"
    if device_type == "mps":
        if "bfloat16" in supported:
            return "bfloat16", "auto: bfloat16 on mps, whose product agrees with float32 on this machine"
        return "float32", "auto: float32 on mps, whose bfloat16 product differs from float32 on this machine"
    if device_type != "cuda":
        return "float32", f"auto: float32 on {device_type}, where 16 bits are not faster everywhere"
    if "bfloat16" not in supported:
        return "float32", "auto: this GPU has no bfloat16"
    return "bfloat16", "auto: bfloat16 on a GPU that has it"


def check_precision(phase: PhaseConfig, device_type: str, device_name: str, supported: Collection[str]) -> None:
    """Check that a device has the precisions that a phase asks for.

    Raises:
        ConfigError: the device lacks one, naming what it has; or torchao is missing, for float8.
    """
    dtype, _ = dtype_of(phase, device_type, supported)
    wanted = {f"dtype={dtype}": dtype, "tf32=true": "tf32" if phase.tf32 else dtype}
    if phase.float8 != "none":
        wanted[f"float8={phase.float8}"] = "float8"
    for setting, name in wanted.items():
        if name not in supported:
            key = setting.partition("=")[0]
            fix = "choose one of them" if key == "dtype" else f"remove {key}"
            raise ConfigError(f"train.{setting}: {device_name} supports {', '.join(supported)}; {fix}")
    if phase.float8 != "none" and importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"train.float8={phase.float8} needs torchao, which is not installed: pip install torchao")
    for key in ("activation_offload", "optimizer_offload"):
        if device_type == "cpu" and getattr(phase, key):
            raise ConfigError(f"train.{key}: on the device cpu all is in the host's memory; remove it")


def check_cpu_precision(phase: PhaseConfig) -> None:
    """Check that the CPU has what a phase asks for, as `check_precision` does.

    Raises:
        ConfigError: naming the setting and what the CPU has.
    """
    check_precision(phase, "cpu", "the device cpu", CPU_PRECISIONS)


def check_batch_is_given(run_id: str, phase: PhaseConfig) -> None:
    """Check that a phase whose plan is off has a batch size.

    Raises:
        ConfigError: its batch size is `auto`.
    """
    if phase.batch_size == "auto":
        raise ConfigError(
            f"run {run_id!r}: batch_size=auto is found by measurement, which plan=off forbids; give a number"
        )


def check_block_steps(n_blocks: int, steps: int) -> None:
    """Check that a phase which trains `n_blocks` blocks in turn has a step for each.

    Raises:
        ConfigError: fewer steps than blocks.
    """
    if steps < n_blocks:
        raise ConfigError(
            f"schedule=sequential trains {n_blocks} blocks in turn, got steps={steps}; "
            f"use steps={n_blocks} or more, or schedule=concurrent"
        )
