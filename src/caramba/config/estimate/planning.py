"""The plan of an experiment: models, cache bytes, stages, memory and work, from the manifest alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from caramba.config.benchmark import BenchmarkKind, MemoryBenchmarkConfig
from caramba.config.estimate.fit import FitResult
from caramba.config.estimate.memory import PhaseEstimate, estimate_phase, keeps_parts, spread_of
from caramba.config.estimate.model import ModelCost, model_cost, runs_teacher
from caramba.config.estimate.variants import feed_forward_widths, variant
from caramba.config.kvcache import KVCacheKind
from caramba.config.manifest import ExperimentName, GroupConfig, Manifest, RunConfig
from caramba.config.model import ModelSpec
from caramba.config.surgery import keeps_copied
from caramba.config.train import PhaseConfig

DEFAULT_CONTEXT = 256
SHOWN_KINDS = (KVCacheKind.FP16, KVCacheKind.Q8_0, KVCacheKind.Q4_0, KVCacheKind.NF4, KVCacheKind.MIXED)


@dataclass(frozen=True)
class CacheRow:
    """Exact cache bytes per token in one format: every layer in execution order, and their sum."""

    kind: KVCacheKind
    student_layers: tuple[Fraction, ...]
    teacher_layers: tuple[Fraction, ...] | None

    @property
    def student_total(self) -> Fraction:
        """Bytes per token of all the student's layers."""
        return sum(self.student_layers, Fraction(0))

    @property
    def teacher_total(self) -> Fraction | None:
        """Bytes per token of all the teacher's layers, None when there is none or it is not described."""
        return None if self.teacher_layers is None else sum(self.teacher_layers, Fraction(0))

    @property
    def ratio(self) -> Fraction | None:
        """Student over teacher, both in this format."""
        teacher = self.teacher_total
        return self.student_total / teacher if teacher else None


@dataclass(frozen=True)
class StagePlan:
    """One run of a group: what it trains, how long, and what that takes.

    A stage that a launch skips or has finished takes 0 steps, tokens and FLOPs, and has no estimate.

    `tokens` and `total_flops` are None while the batch size is `auto`, the latter too where a layer does not declare
    its work; `estimate` then holds for a batch of one, and is None when the trained model is not described by the
    manifest. Of several ranks `tokens` are those of all, and the memory of `estimate` is one rank's.
    """

    group: str
    id: str
    phase: str
    trains: str
    objective: str
    steps: int
    batch_size: int | str
    accumulation: int
    block_size: int
    lr: float
    tokens: int | None
    total_flops: float | None
    estimate: PhaseEstimate | None
    note: str = ""


@dataclass(frozen=True)
class ExperimentPlan:
    """All that is known before anything runs. `context` is the block size that FLOPs are counted at."""

    name: str
    command: str
    context: int
    student: ModelCost
    teacher: ModelCost | None
    teacher_source: str | None
    cache: tuple[CacheRow, ...]
    stages: tuple[StagePlan, ...]
    benchmarks: tuple[str, ...]
    notes: tuple[str, ...] = ()
    fit: FitResult | None = None

    @property
    def upcycles(self) -> bool:
        """Whether there is a teacher, described here or not."""
        return self.teacher is not None or self.teacher_source is not None


def plan(
    manifest: Manifest,
    command: str = "",
    fit: FitResult | None = None,
    finished: Mapping[tuple[str, str], str] | None = None,
) -> ExperimentPlan:
    """Work out the plan of the groups that a manifest selects.

    Args:
        manifest: the validated experiment.
        command: what a user types to run it.
        fit: the derivation, where the manifest's model was scaled from a preset.
        finished: (group, run id) of the stages that a launch would not repeat, and where they were trained.

    Raises:
        ConfigError: widths that do not fit, in the model or in its teacher.
    """
    groups = manifest.groups_to_run()
    student = model_cost(manifest.model)
    teacher, source = None, None
    if manifest.model.teacher is not None:
        source = manifest.model.teacher.checkpoint
        if manifest.model.teacher.manifest is not None:
            teacher = model_cost(manifest.model.teacher.manifest, "model.teacher.manifest")
    phases = [phase for group in groups for _, phase in group.trained]
    notes: tuple[str, ...] = ()
    for model, what in ((student, "the model"), (teacher, "the teacher")):
        notes += () if model is None else tuple(_undeclared(model, what))
    if kept := student.first_bytes(KVCacheKind.FP16):
        notes += (f"first tokens at full precision take {kept:,} bytes a sequence besides in fp16",)
    surgery = manifest.model.surgery
    if surgery is not None and surgery.kv_budget_bytes is not None:
        notes += (
            f"surgery.kv_budget_bytes={surgery.kv_budget_bytes}: surgery chooses the widths of each layer under "
            f"{surgery.kv_budget_bytes:,} bytes a token in fp16; the student above has those that it starts from",
        )
    return ExperimentPlan(
        name=manifest.name,
        command=command,
        context=max((phase.block_size for phase in phases), default=DEFAULT_CONTEXT),
        student=student,
        teacher=teacher,
        teacher_source=source,
        cache=tuple(_cache_row(kind, student, teacher) for kind in _cache_kinds(groups)),
        stages=tuple(
            _stage(manifest, group, run, phase, student, teacher, (finished or {}).get((group.name, run.id)))
            for group in groups
            for run, phase in group.trained
        ),
        benchmarks=tuple(f"{bench.id} ({bench.config.type})" for group in groups for bench in group.benchmarks),
        notes=notes,
        fit=fit,
    )


def _undeclared(model: ModelCost, what: str) -> Iterator[str]:
    """Yield what the figures of a model leave out, because its layers do not declare it."""
    if names := model.undeclared("flops"):
        yield f"FLOPs of {what} are at least those shown: {', '.join(names)} declares no macs_per_token()"
    if names := model.undeclared("activations"):
        yield f"activation memory of {what} is at least that shown: {', '.join(names)} declares no saved_elements()"
    if names := model.undeclared("cache"):
        yield (
            f"{what} cannot be decoded: {', '.join(names)} does not say by `decoding` if it looks at other tokens; "
            "the cache shown is that of the other layers"
        )


def _cache_kinds(groups: tuple[GroupConfig, ...]) -> tuple[KVCacheKind, ...]:
    """Return the formats to show, those that a benchmark adds last."""
    configs = [bench.config for group in groups for bench in group.benchmarks]
    return tuple(dict.fromkeys((*SHOWN_KINDS, *(kind for config in configs for kind in _kinds_of(config)))))


def _kinds_of(config: BenchmarkKind) -> tuple[KVCacheKind, ...]:
    if isinstance(config, MemoryBenchmarkConfig):
        return config.quantization_modes
    kind = getattr(config, "cache_kind", None)
    return () if kind is None else (kind,)


def _cache_row(kind: KVCacheKind, student: ModelCost, teacher: ModelCost | None) -> CacheRow:
    return CacheRow(kind, student.kv_bytes_per_layer(kind), teacher and teacher.kv_bytes_per_layer(kind))


def _stage(
    manifest: Manifest,
    group: GroupConfig,
    run: RunConfig,
    phase: PhaseConfig,
    student: ModelCost,
    teacher: ModelCost | None,
    finished_in: str | None = None,
) -> StagePlan:
    trains = phase.trains or "student"
    nothing = StagePlan(
        group=group.name,
        id=run.id,
        phase=phase.phase,
        trains=trains,
        objective=phase.objective,
        steps=0,
        batch_size=phase.batch_size,
        accumulation=phase.gradient_accumulation_steps,
        block_size=phase.block_size,
        lr=phase.learning_rate_at(manifest.model.embedder.d_model),
        tokens=0,
        total_flops=0.0,
        estimate=None,
    )
    skipped = _skip_note(manifest, phase, trains) if finished_in is None else f"finished in {finished_in}"
    if skipped is not None:
        return replace(nothing, note=skipped)
    trained = teacher if trains == "teacher" else student
    if run.exp is not None:
        trained = model_cost(variant(manifest.model, run.exp))
    in_parts = keeps_parts(phase, manifest.device, manifest.kernels)
    if trained is not None and in_parts:
        in_parts = trained.topology.spared_elements > 0
        trained = trained.with_split_keys()
    steps = run.steps or phase.steps
    if manifest.debug.max_steps is not None:
        steps = min(steps, manifest.debug.max_steps)
    spread = spread_of(manifest)
    estimate = tokens = flops = None
    if trained is not None:
        kept = keeps_copied(phase, manifest.model, group)
        running = teacher if trains == "student" else None
        estimate = estimate_phase(phase, trained, running, keeps_copied=kept, spread=spread)
    if isinstance(phase.batch_size, int):
        tokens = steps * phase.batch_size * phase.block_size * phase.gradient_accumulation_steps
        if not (phase.phase == "blockwise" and spread.parallel.blockwise == "blocks"):
            tokens *= spread.data_ranks
        if estimate is not None and estimate.flops_per_token is not None:
            flops = tokens * estimate.flops_per_token
    note = (
        _stage_note(manifest, phase, trains, teacher, in_parts=in_parts)
        if run.exp is None
        else _variant_note(manifest.model, run.exp)
    )
    return replace(nothing, steps=steps, tokens=tokens, total_flops=flops, estimate=estimate, note=note)


def _variant_note(model: ModelSpec, exp: ExperimentName) -> str:
    spec = variant(model, exp)
    cost, reference = model_cost(spec), model_cost(model)
    widths = ", ".join(f"{width:,}" for width in dict.fromkeys(feed_forward_widths(spec)))
    return (
        f"{exp} at {cost.params:,} parameters ({cost.params / reference.params - 1:+.2%}), d_ff {widths}, "
        f"{float(cost.kv_bytes_per_token(KVCacheKind.FP16)):g} bytes of cache a token in fp16"
    )


def _skip_note(manifest: Manifest, phase: PhaseConfig, trains: str) -> str | None:
    """Return why a phase is skipped: the teacher that it would train has a checkpoint. A control trains on from it."""
    teacher = manifest.model.teacher
    if trains != "teacher" or phase.control or teacher is None or teacher.checkpoint is None:
        return None
    return f"skipped: the teacher comes from {teacher.checkpoint}"


def _stage_note(
    manifest: Manifest, phase: PhaseConfig, trains: str, teacher: ModelCost | None, *, in_parts: bool
) -> str:
    notes = list[str]()
    if trains == "student" and runs_teacher(phase) and teacher is None:
        notes.append("the teacher is not counted: it is not described here")
    if phase.batch_size == "auto":
        notes.append("batch size auto: memory is for a batch of 1")
    if spread_of(manifest).is_open:
        notes.append("parallel.dp auto: memory and tokens are for dp=1")
    if phase.activation_checkpointing != "none":
        notes.append("activation checkpointing is not counted")
    if in_parts:
        notes.append("wide keys count in two parts, as Triton's kernel keeps them on CUDA")
    return "; ".join(notes)
