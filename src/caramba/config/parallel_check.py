"""Which phases and benchmarks can be spread over ranks, and how: refused by name before anything is built."""

from __future__ import annotations

from collections.abc import Iterator

from caramba.config.extension import name_of
from caramba.config.ladder import LadderConfig
from caramba.config.manifest import Manifest
from caramba.config.parallel import ParallelConfig
from caramba.config.pipeline import pipeline_conflicts, pipeline_problem
from caramba.config.sharding_limits import float16_conflict, whole_model_keys
from caramba.config.tensor_parallel import check_layers
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.errors import ConfigError, quote

SHARDED_OPTIMIZERS = ("adamw", "sgd")


def check_parallel(manifest: Manifest) -> None:
    """Refuse what the strategy of a manifest cannot train; layers of variants are checked by `cost`.

    Raises:
        ConfigError: naming the run or the benchmark, the key and what to use.
    """
    parallel = manifest.parallel
    if parallel.strategy == "single":
        return
    for group in manifest.groups_to_run():
        for run in group.runs:
            for problem in () if run.train is None else conflicts(run.train, parallel):
                raise ConfigError(f"run {run.id!r}: {problem}")
            if run.train is not None and (parallel.strategy == "pipeline" or parallel.tp > 1):
                _check_model(manifest, run.id, run.train)
        if parallel.strategy == "pipeline" and group.runs and group.data.keeps_documents_apart:
            raise ConfigError(
                f"group {group.name!r}: separate documents (data.packing, data.document_mask) are known to the "
                "first stage of parallel=pipeline alone; use parallel=fsdp2, or leave them joined"
            )
        for bench in group.benchmarks:
            if isinstance(bench.config, LadderConfig):
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: the ladder trains its rows in one process, got parallel="
                    f"{parallel.strategy}; use parallel=single, or remove the benchmark"
                )


def _check_model(manifest: Manifest, run_id: str, phase: PhaseConfig) -> None:
    """Refuse a model of the manifest that a run would have to cut into stages, or whose layers to share, and cannot."""
    teacher, parallel = manifest.model.teacher, manifest.parallel
    is_student = phase.trains != "teacher"
    spec = manifest.model if is_student else teacher and teacher.manifest
    if spec is None:
        return
    if parallel.tp > 1:
        if phase.trains == "variant":  # of other widths than the manifest's model, in the same tree
            return
        try:
            path = "model" if is_student else "model.teacher.manifest"
            check_layers(spec, parallel.tp, split_sequence=parallel.sequence_parallel, path=path)
        except ConfigError as error:
            raise ConfigError(f"run {run_id!r}: {error}") from None
        return
    problem = pipeline_problem(spec, parallel.pp)
    if problem is not None:
        raise ConfigError(f"run {run_id!r}: {problem}")


def conflicts(phase: PhaseConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield what a phase asks for that its strategy does not have."""
    if phase.loss is not None and parallel.strategy not in ("single", "ddp"):
        yield (
            f"loss={phase.loss.type} reads whole logits, and parallel={parallel.strategy} splits the model; use "
            "parallel=ddp or single, or remove loss"
        )
    if parallel.strategy == "pipeline":
        yield from pipeline_conflicts(phase, parallel)
        return
    if phase.phase in BLOCK_PHASES:
        if parallel.blockwise == "blocks" and phase.convergence is not None:
            yield (
                "parallel.blockwise=blocks trains other blocks on every rank, which convergence would end at different "
                "steps; use parallel.blockwise=data, or remove convergence"
            )
        if parallel.blockwise == "blocks" and phase.phase == "drift":
            yield (
                "phase=drift reads the student's own hidden states, and parallel.blockwise=blocks leaves the blocks of "
                "other ranks as they were until the phase ends; use parallel.blockwise=data, or remove the phase"
            )
        if parallel.tp > 1:
            yield (
                f"phase={phase.phase} trains attention layers one by one, which parallel=fsdp2_tp splits over ranks; "
                "use parallel=ddp or fsdp2"
            )
        return
    if not parallel.is_sharded:
        return
    name = f"parallel={parallel.strategy}"
    if parallel.sequence_parallel and phase.block_size % parallel.tp:
        yield (
            f"parallel.sequence_parallel gives each of tp={parallel.tp} ranks as many tokens, got block_size="
            f"{phase.block_size}; use a multiple of {parallel.tp}, or sequence_parallel=false"
        )
    if name_of(phase.optimizer) not in SHARDED_OPTIMIZERS:
        yield (
            f"optimizer={name_of(phase.optimizer)} is made for whole weights, and {name} keeps a part of each "
            f"on every rank; use optimizer={' or '.join(SHARDED_OPTIMIZERS)}, or parallel=ddp"
        )
    if phase.has_16_bit_weights:
        yield (
            f"use_amp=false with dtype=bfloat16 keeps weights in 16 bits, and {name} keeps them in float32 and gathers "
            "them in 16; remove use_amp, or use parallel=ddp"
        )
    yield from float16_conflict(phase, name)
    for key in whole_model_keys(phase, hidden_weight=0.0):
        yield f"{key} is not made for sharded weights, got {name}; use parallel=ddp, or remove {key}"
    if parallel.wrap is not None and phase.compile_model is not False:
        yield (
            f"parallel.wrap={list(parallel.wrap)} gathers weights at these types, which may be within code that "
            f"compile_model={phase.compile_model} compiles as one; use one of the two"
        )
    compiles, granularity = phase.compile_model is not False, phase.activation_checkpoint_granularity
    if compiles and phase.activation_checkpointing != "none" and granularity == "block":
        yield (
            f"compile_model with activation_checkpointing by blocks would compile what {name} gathers; use "
            "activation_checkpoint_granularity=layer"
        )
