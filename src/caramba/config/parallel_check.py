"""Which phases and benchmarks can be spread over ranks, and how: refused by name before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from caramba.config.attention import AttentionLayerConfig
from caramba.config.benchmark import LadderConfig, OptimizersConfig
from caramba.config.extension import NodeConfig, is_own, name_of
from caramba.config.layer import AttentionDims, DropoutLayerConfig, SwiGLULayerConfig
from caramba.config.manifest import Manifest
from caramba.config.memory_bank import MemoryBankLayerConfig
from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.topology import NestedTopologyConfig, StackedTopologyConfig, TopologyConfig
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.errors import ConfigError, quote

_OFF: dict[str, Any] = {
    "lora": None,
    "ema_decay": None,
    "optimizer_offload": False,
    "activation_offload": False,
    "float8": "none",
}


def whole_model_keys(phase: PhaseConfig, **more: Any) -> list[str]:
    """Return the keys of a phase that need the whole model on a rank. `more` adds keys with their off values."""
    return [key for key, off in {**_OFF, **more}.items() if getattr(phase, key) != off]


def float16_conflict(phase: PhaseConfig, name: str) -> Iterator[str]:
    """Yield why a phase in float16 cannot have the strategy `name`, if it is one."""
    if phase.dtype == "float16" or phase.amp_dtype == "float16":
        yield f"float16 scales its loss, which {name} does not; use bfloat16, or parallel=ddp"


ELSE = "use parallel=fsdp2"


def stack_of(spec: ModelSpec) -> tuple[int, NestedTopologyConfig] | None:
    """Return the index of the root's one repeated list, and that list; None if there is not one."""
    if not isinstance(spec.topology, StackedTopologyConfig):
        return None
    found = [
        (index, layer) for index, layer in enumerate(spec.topology.layers) if isinstance(layer, NestedTopologyConfig)
    ]
    return found[0] if len(found) == 1 else None


def pipeline_problem(spec: ModelSpec, n_stages: int) -> str | None:
    """Return why a model cannot be cut into `n_stages` stages of as many equal blocks, None where it can."""
    found = stack_of(spec)
    if found is None:
        return (
            "parallel=pipeline cuts a uniform stack, one NestedTopology in the StackedTopology that is the model's "
            f"root, and this topology has no such list or several; {ELSE}"
        )
    repeat = found[1].repeat
    if repeat % n_stages:
        return (
            f"parallel=pipeline gives every stage as many blocks, and pp={n_stages} does not divide the {repeat} of "
            f"the stack; use a pp that does, or {ELSE}"
        )
    return None


def pipeline_conflicts(phase: PhaseConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield what a phase asks for that stages do not have."""
    name = "parallel=pipeline"
    if phase.reads_teacher:
        what = f"phase={phase.phase}" + (f" with objective={phase.objective}" if phase.objective != "ce" else "")
        yield f"{what} reads a teacher, which {name} does not cut into stages; {ELSE} or ddp"
        return
    if measured := phase.measured_keys:
        verb, values = ("is", "it a value") if len(measured) == 1 else ("are", "them values")
        yield (
            f"{', '.join(measured)} {verb} chosen by measuring one process, and {name} has a part of the model on "
            f"every rank; give {values}"
        )
    elif isinstance(phase.batch_size, int) and phase.batch_size % parallel.micro_batches:
        yield (
            f"{name} cuts a batch into num_micro_batches={parallel.micro_batches} equal parts, got batch_size="
            f"{phase.batch_size}; use a multiple of {parallel.micro_batches}"
        )
    if phase.has_16_bit_weights:
        yield f"use_amp=false with dtype=bfloat16 keeps weights in 16 bits, which {name} does not; remove use_amp"
    yield from float16_conflict(phase, name)
    for key in whole_model_keys(phase, compile_model=False):
        yield f"{key} is not made for the stages of {name}; remove it, or use parallel=ddp"
    if phase.gradient_clip_algorithm == "adagc":
        yield f"gradient_clip_algorithm=adagc is not made for the stages of {name}; use norm or value"


def check_layers(spec: ModelSpec, n_ranks: int, *, split_sequence: bool, path: str = "model") -> None:
    """Refuse a model whose layers `n_ranks` cannot share.

    Raises:
        ConfigError: naming the heads, the features or the dropout, and the layer.
    """
    for where, layer in _layers(spec.topology, f"{path}.topology"):
        try:
            check_layer(layer, n_ranks, split_sequence=split_sequence)
        except ConfigError as error:
            raise ConfigError(f"{error} ({where})") from None


def check_layer(layer: NodeConfig, n_ranks: int, *, split_sequence: bool) -> None:
    """Refuse a layer that `n_ranks` cannot share.

    Raises:
        ConfigError: heads or features that they cannot share equally, dropout of a rank's own tokens, or a layer that
            is not caramba's.
    """
    if is_own(type(layer)):
        raise ConfigError(
            f"tensor parallel: there is no plan for a {layer.type}, a layer of your own; use parallel=ddp or fsdp2"
        )
    if isinstance(layer, MemoryBankLayerConfig):
        raise ConfigError("tensor parallel: there is no plan for a MemoryBankLayer; use parallel=ddp or fsdp2")
    if isinstance(layer, AttentionLayerConfig):
        dims_of_rank(layer.dims(), n_ranks, layer.is_latent)
    elif isinstance(layer, SwiGLULayerConfig):
        check_features(layer.d_ff, n_ranks)
    elif isinstance(layer, DropoutLayerConfig) and split_sequence:
        check_dropout(layer.p, n_ranks)


def check_features(d_ff: int, n_ranks: int) -> None:
    """Refuse features of a feed-forward network that `n_ranks` cannot share equally."""
    if d_ff % n_ranks:
        raise ConfigError(
            f"tensor parallel: {n_ranks} ranks cannot share d_ff={d_ff} features; use a multiple of {n_ranks}, or "
            "fewer ranks"
        )


def check_dropout(p: float, n_ranks: int) -> None:
    """Refuse dropout of a rank's own tokens: ranks are seeded alike."""
    if p > 0:
        raise ConfigError(
            f"tensor parallel: with sequence_parallel a DropoutLayer with p={p:g} would drop the same features "
            f"of other tokens on each of {n_ranks} ranks; use p=0, or sequence_parallel=false"
        )


def _layers(node: NodeConfig, path: str) -> Iterator[tuple[str, NodeConfig]]:
    if not isinstance(node, TopologyConfig):
        yield path, node
        return
    for index, child in enumerate(node.layers):
        yield from _layers(child, f"{path}.layers[{index}]")


def dims_of_rank(dims: AttentionDims, n_ranks: int, is_latent: bool) -> AttentionDims:
    """Return the widths of the heads of one rank.

    Raises:
        ConfigError: heads that the ranks cannot share equally.
    """
    heads, kv_heads = dims.n_heads, dims.n_kv_heads
    has_own_keys = not is_latent or dims.first_tokens > 0
    for name, count in (
        ("n_heads", heads),
        *([("n_kv_heads", kv_heads)] if has_own_keys and kv_heads > 1 else []),
    ):
        if count % n_ranks:
            divisors = [n for n in range(2, count + 1) if count % n == 0]
            fix = f"one of {', '.join(map(str, divisors))}" if divisors else "one rank"
            raise ConfigError(f"tensor parallel: {n_ranks} ranks cannot share {name}={count} heads; use {fix}")
    own = kv_heads // n_ranks if kv_heads > 1 and has_own_keys else kv_heads

    def share(streams: Any) -> Any:
        return tuple((name, own if n == kv_heads else n, width) for name, n, width in streams)

    return replace(
        dims,
        n_heads=heads // n_ranks,
        n_kv_heads=own,
        streams=dims.streams if is_latent else share(dims.streams),
        first_streams=share(dims.first_streams),
    )


SHARDED_OPTIMIZERS = ("adamw", "sgd")


def check_parallel(manifest: Manifest) -> None:
    """Refuse what the strategy of a manifest cannot train; layers of variants are checked by `cost`.

    Raises:
        ConfigError: naming the run or the benchmark, the key and what to use.
    """
    parallel = manifest.parallel
    for group in manifest.groups_to_run():
        for run, phase in group.trained:
            for problem in conflicts(phase, parallel):
                raise ConfigError(f"run {run.id!r}: {problem}")
            if parallel.strategy == "pipeline" or parallel.tp > 1:
                _check_model(manifest, run.id, phase)
        if parallel.strategy == "pipeline" and group.runs and group.data.keeps_documents_apart:
            raise ConfigError(
                f"group {group.name!r}: separate documents (data.packing, data.document_mask) are known to the "
                "first stage of parallel=pipeline alone; use parallel=fsdp2, or leave them joined"
            )
        for bench in group.benchmarks:
            if isinstance(bench.config, LadderConfig | OptimizersConfig):
                what = "ladder" if isinstance(bench.config, LadderConfig) else "table of optimisers"
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: the {what} trains its rows in one process, got parallel="
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
    if phase.orchestrator_enabled and parallel.strategy not in ("single", "ddp"):
        yield (
            f"orchestrator_enabled forks whole weights and states, and parallel={parallel.strategy} splits them; use "
            "parallel=ddp or single, or remove orchestrator_enabled"
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
