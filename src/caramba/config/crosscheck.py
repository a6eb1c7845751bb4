"""Rules between sections that one schema class cannot see: model against data, phases against teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator

from caramba.config.base import SLUG
from caramba.config.benchmark import (
    STAGED,
    AccuracyBenchmarkConfig,
    BenchmarkKind,
    ControlsBenchmarkConfig,
    InferenceLadderConfig,
    LadderConfig,
    LatencyBenchmarkConfig,
    LongContextBenchmarkConfig,
    MemoryBenchmarkConfig,
    MemoryGapBenchmarkConfig,
    OptimizersConfig,
    PerplexityBenchmarkConfig,
)
from caramba.config.layer_base import LayerConfig
from caramba.config.manifest import GroupConfig, Manifest, RunConfig
from caramba.config.model import ModelConfig, ModelSpec
from caramba.config.parallel_check import check_parallel
from caramba.config.surgery import check_surgery
from caramba.config.topology import attention_configs, custom_layers, memory_window
from caramba.config.train import PhaseConfig
from caramba.config.verify import (
    CompareVerifyConfig,
    EvalVerifyConfig,
    FidelityVerifyConfig,
    IntGreedyCase,
    KVCacheVerifyConfig,
    VerifyConfig,
)
from caramba.errors import ConfigError, quote

PATHS = {"student": "model.topology", "teacher": "model.teacher.manifest.topology"}
DECODING_BENCHMARKS = (LatencyBenchmarkConfig, MemoryBenchmarkConfig, InferenceLadderConfig)


def custom_layers_by_role(manifest: Manifest) -> dict[str, list[tuple[str, LayerConfig]]]:
    """Return (path, layer) of the custom layers in a manifest's student and, if it has one, its teacher."""
    teacher = manifest.model.teacher.manifest if manifest.model.teacher is not None else None
    specs = {"student": manifest.model, "teacher": teacher}
    return {role: list(custom_layers(spec.topology, PATHS[role])) for role, spec in specs.items() if spec is not None}


def check_custom_layers(manifest: Manifest) -> None:
    """Refuse to decode models that cannot decode, and separate documents in layers that may mix them.

    Raises:
        ConfigError: naming what decodes, the layer and the fixes.
    """
    layers = custom_layers_by_role(manifest)
    undecodable = {
        role: next(((path, layer) for path, layer in found if layer.decoding == "refused"), None)
        for role, found in layers.items()
    }
    for group in manifest.groups_to_run():
        for what, roles in _decoders(group):
            for role in roles:
                found = undecodable.get(role)
                if found is not None:
                    path, layer = found
                    raise ConfigError(
                        f"{what} decodes token by token, and {path} is a {layer.type}, which does not say how it is "
                        f'decoded; set decoding = "per_token" or "cached" in {type(layer).__name__}, or remove what '
                        "decodes (benchmark=none)"
                    )
        if not group.data.keeps_documents_apart:
            continue
        mixing = [item for found in layers.values() for item in found if item[1].decoding != "per_token"]
        if mixing and (group.runs or group.benchmarks):
            path, layer = mixing[0]
            raise ConfigError(
                f"group {group.name!r}: data.packing or data.document_mask separates documents, and {path} is a "
                f"{layer.type}, which may look at other tokens and so across documents; leave documents joined, or set "
                f'decoding = "per_token" in {type(layer).__name__} if it looks at none'
            )


def _decoders(group: GroupConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what decodes in a group, and the models that it decodes."""
    both = ("student", "teacher")
    for run in group.runs:
        yield from _decoding_runs(run)
        for check in run.verify:
            if _check_decodes(check):
                yield f"run {run.id!r}: verify {check.type}", both
    for bench in group.benchmarks:
        if _benchmark_decodes(bench.config):
            yield f"benchmark {quote(bench.id)} ({bench.config.type})", bench.models


def _decoding_runs(run: RunConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    if run.sample is not None:
        yield f"run {run.id!r}: mode=sample", (run.sample.role,)
    elif run.mode == "chat":
        yield f"run {run.id!r}: mode=chat", (run.chat.role if run.chat is not None else "student",)


def _check_decodes(check: VerifyConfig) -> bool:
    if isinstance(check, EvalVerifyConfig):
        return any(isinstance(case, IntGreedyCase) for case in check.cases)
    return isinstance(check, KVCacheVerifyConfig)


def _benchmark_decodes(config: BenchmarkKind) -> bool:
    if isinstance(config, PerplexityBenchmarkConfig):
        return config.cache_kind is not None
    return isinstance(config, DECODING_BENCHMARKS)


LONGEST_GENERATION = "longest of prompt_lengths + generation_lengths - 1"

BYTE_VOCABULARY = 257  # 256 bytes and the end mark


def cross_check(manifest: Manifest) -> None:
    """Check what spans several sections of a manifest, except the vocabulary (`check_vocabulary`).

    Raises:
        ConfigError: naming both sides and how to make them agree.
    """
    model = manifest.model
    teacher = model.teacher.manifest if model.teacher is not None else None
    if teacher is not None and teacher.embedder.vocab_size != model.embedder.vocab_size:
        raise ConfigError(
            f"model.embedder.vocab_size={model.embedder.vocab_size} differs from model.teacher.manifest.embedder."
            f"vocab_size={teacher.embedder.vocab_size}; a student reads its teacher's tokens, so make them equal"
        )
    if model.teacher is not None:
        check_surgery(model)
    if manifest.parallel.strategy != "single":
        check_parallel(manifest)
    check_custom_layers(manifest)
    for group in manifest.groups_to_run():
        for run in group.runs:
            if run.verify and model.teacher is None:
                raise ConfigError(
                    f"run {run.id!r}: verify {run.verify[0].type} compares with a teacher, and the model has none; "
                    "choose verify=none or a model with a teacher (model=tiny_dba)"
                )
            if run.train is not None:
                _check_run(model, teacher, run, run.train)
                _check_trainer(manifest, run, run.train)
        for bench in group.benchmarks:
            if isinstance(bench.config, ControlsBenchmarkConfig) and model.teacher is None:
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: controls are made from a teacher, and the model has none; choose a "
                    "model with a teacher (model=tiny_dba), or remove the benchmark"
                )
            distils = isinstance(bench.config, OptimizersConfig) and bench.config.objective == "kl"
            if distils and (model.teacher is None or "student" not in bench.models):
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: objective=kl distils a student from its teacher, got "
                    f"models={list(bench.models)} and {'no' if model.teacher is None else 'a'} teacher; choose a model "
                    "with a teacher (model=hf_dba), or objective=ce"
                )
            if isinstance(bench.config, STAGED) and not re.match(SLUG, bench.id):
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: its {bench.config.type} names files after it; use letters, digits, "
                    "'_', '-' and '.'"
                )
        specs = {"student": model, "teacher": teacher}
        _check_positions(group, specs)
        _check_dynamic_scaling(group, specs)


def _check_trainer(manifest: Manifest, run: RunConfig, phase: PhaseConfig) -> None:
    trainer = manifest.trainer
    for key in trainer.needs_validation:
        if phase.eval_every is None or phase.eval_every > phase.steps:
            raise ConfigError(
                f"trainer.{key} goes by the held-out loss, and run {run.id!r} of {phase.steps} steps never measures it "
                f"(eval_every={phase.eval_every}); set settings.eval_iters={max(1, phase.steps // 10)}"
            )
    if trainer.save_last_k and phase.save_every is None:
        raise ConfigError(f"trainer.save_last_k: run {run.id!r} has no save_every; set settings.save_every=STEPS")
    if trainer.keeps_weights:
        reason = (
            f"parallel={manifest.parallel.strategy} has the weights in parts"
            if manifest.parallel.strategy not in ("single", "ddp")
            else "lora merges its updates at the end"
            if phase.lora is not None
            else "bfloat16 weights have their masters in the optimiser"
            if phase.has_16_bit_weights
            else None
        )
        if reason is not None:
            raise ConfigError(
                f"trainer.save_top_k, save_last_k and restore_best save the weights of a step, and {reason}; "
                "remove them"
            )


def check_vocabulary(manifest: Manifest) -> None:
    """Check that the data's tokens are those that the model reads, where both are known before the data is opened.

    Raises:
        ConfigError: naming both vocabulary sizes.
    """
    vocab = manifest.model.embedder.vocab_size
    for group in manifest.groups_to_run():
        if not group.runs and not group.benchmarks and manifest.model.teacher is None:
            continue  # nothing reads the data
        data = group.data
        needed = BYTE_VOCABULARY if data.type != "tokens" and data.tokenizer == "byte" else data.vocab_size
        if needed is None:
            continue
        is_exact = data.type != "tokens" and data.tokenizer == "bpe"
        if needed > vocab or (is_exact and needed != vocab):
            raise ConfigError(
                f"model.embedder.vocab_size={vocab} does not fit the data of group {group.name!r}: vocab_size={needed} "
                f"(type {data.type}, tokenizer {data.tokenizer}). Make model.embedder.vocab_size and "
                "data.vocab_size equal, or give tokens made for this model (data=tokens data.path=…)"
            )


def _check_run(model: ModelConfig, teacher: ModelSpec | None, run: RunConfig, phase: PhaseConfig) -> None:
    if model.teacher is None:
        needs = f"phase={phase.phase}" if phase.phase in ("blockwise", "drift") else ""
        needs = needs or (f"objective={phase.objective}" if phase.objective in ("kl", "mixed") else "")
        needs = needs or ("trains=teacher" if phase.trains == "teacher" else "")
        if needs:
            raise ConfigError(
                f"run {run.id!r}: {needs} needs model.teacher, and the model has none; choose a model that has one "
                "(model=tiny_dba), set model.teacher.checkpoint=RUN, or train without a teacher (train=pretrain)"
            )
    if run.verify and phase.trains == "teacher":
        raise ConfigError(
            f"run {run.id!r} trains the teacher, and verify compares a student with it; move verify to a later run"
        )
    if phase.trains == "teacher" and teacher is None:
        raise ConfigError(
            f"run {run.id!r} trains the teacher, and model.teacher.manifest does not describe its network; "
            "add it, or remove the run and give model.teacher.checkpoint"
        )
    if phase.phase in ("blockwise", "drift") and teacher is not None:
        ours, theirs = len(attention_configs(model.topology)), len(attention_configs(teacher.topology))
        if ours != theirs:
            raise ConfigError(
                f"run {run.id!r}: phase={phase.phase} pairs attention layers, and the student has {ours} while "
                f"the teacher has {theirs}; give them the same depth"
            )
    if phase.trainable == "maps":
        _check_copied(run, model)
    if phase.memory_resize is not None:
        _check_memory_resize(run, phase, teacher if phase.trains == "teacher" else model)


def _check_memory_resize(run: RunConfig, phase: PhaseConfig, model: ModelSpec | None) -> None:
    """Refuse to resize what has no memory slots, and windows of text that nothing leaves."""
    window = None if model is None else memory_window(model.topology)
    if window is None:
        raise ConfigError(
            f"run {run.id!r}: memory_resize changes memory slots, and the model has no MemoryBankLayer; remove it, or "
            "use one (model=tiny_memory)"
        )
    if phase.block_size <= window:
        raise ConfigError(
            f"run {run.id!r}: memory_resize reads slots in text of block_size={phase.block_size}, and nothing leaves a "
            f"window of {window}; use a larger block_size"
        )


def _check_copied(run: RunConfig, model: ModelConfig) -> None:
    """Refuse to leave weights as they are that surgery has not copied from the teacher."""
    layers = attention_configs(model.topology)
    place = next((at for at, layer in enumerate(layers) if not layer.is_latent), None)
    if place is not None:
        raise ConfigError(
            f"run {run.id!r}: trainable=maps leaves W_q and W_o as surgery to layout=latent copies them, and attention "
            f"layer {place} is {layers[place].mode}, layout={layers[place].layout}; use trainable=all, or a latent "
            "student (model=tiny_dba)"
        )
    if model.surgery is not None and model.surgery.method == "random":
        raise ConfigError(
            f"run {run.id!r}: trainable=maps leaves W_q and W_o as surgery copies them, and surgery.method=random "
            "copies nothing; use trainable=all, or surgery.method=dba"
        )


def _check_positions(group: GroupConfig, specs: dict[str, ModelSpec | None]) -> None:
    """Refuse sequences that are longer than the learned positions of a model that reads them."""
    for owner, key, length, readers in _lengths(group):
        for role in readers:
            spec = specs[role]
            most = spec.embedder.max_positions if spec is not None else None
            if most is not None and length > most:
                name = "model" if role == "student" else "model.teacher.manifest"
                raise ConfigError(
                    f"{owner}: {key}={length} exceeds {name}.embedder.max_positions={most}; use {most} or fewer, or a "
                    "larger max_positions"
                )


def _longest_generation(config: LatencyBenchmarkConfig) -> int:
    """Return the most tokens that a generation reads: the last one is not read again."""
    return max(config.prompt_lengths) + max(config.generation_lengths) - 1


def _check_dynamic_scaling(group: GroupConfig, specs: dict[str, ModelSpec | None]) -> None:
    """Refuse to read in parts what is longer than dynamic RoPE scaling's own length: its frequencies depend on the
    whole length there, and keys that are cached no longer fit."""
    for bench in group.benchmarks:
        config = bench.config
        if isinstance(config, LatencyBenchmarkConfig) and max(config.generation_lengths) > 1:
            longest, key = _longest_generation(config), LONGEST_GENERATION
        elif isinstance(config, PerplexityBenchmarkConfig) and config.cache_kind is not None:
            longest, key = config.block_size, f"cache_kind={config.cache_kind}, block_size"
        else:
            continue
        for role in bench.models:
            spec = specs[role]
            layers = [] if spec is None else attention_configs(spec.topology)
            scalings = [layer.rope_scaling for layer in layers if layer.rope_scaling is not None]
            limits = [scaling.original_max_position_embeddings for scaling in scalings if scaling.type == "dynamic"]
            if limits and longest > min(limits):
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: {key}={longest} is read through a cache, and rope_scaling "
                    f"type=dynamic of the {role} goes with one forward beyond {min(limits)} tokens; use that many or "
                    "fewer, or type: yarn"
                )


def _lengths(group: GroupConfig) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """Yield (owner, key, longest sequence, which models read it) of everything in a group that runs a model."""
    both = ("student", "teacher")
    for run in group.runs:
        if run.train is not None:
            yield f"run {run.id!r}", "block_size", run.train.block_size, both
        for check in run.verify:
            if isinstance(check, CompareVerifyConfig | FidelityVerifyConfig):
                yield f"run {run.id!r}: verify {check.type}", "block_size", check.block_size, both
            elif isinstance(check, KVCacheVerifyConfig):
                yield f"run {run.id!r}: verify {check.type}", "tokens", check.tokens, both
    for bench in group.benchmarks:
        owner, config = f"benchmark {quote(bench.id)}", bench.config
        if isinstance(config, PerplexityBenchmarkConfig):
            yield owner, "block_size", config.block_size, bench.models
        elif isinstance(config, ControlsBenchmarkConfig | LadderConfig | OptimizersConfig | MemoryGapBenchmarkConfig):
            yield owner, "block_size", config.block_size, both
        elif isinstance(config, LatencyBenchmarkConfig):
            yield owner, LONGEST_GENERATION, _longest_generation(config), bench.models
        elif isinstance(config, MemoryBenchmarkConfig):
            yield owner, "longest of sequence_lengths", max(config.sequence_lengths), bench.models
        elif isinstance(config, LongContextBenchmarkConfig):
            yield owner, "longest of lengths", max(config.lengths), bench.models
        elif isinstance(config, AccuracyBenchmarkConfig) and config.max_length is not None:
            yield owner, "max_length", config.max_length, bench.models
