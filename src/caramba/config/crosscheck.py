"""Rules between sections that one schema class cannot see: model against data, phases against teacher."""

from __future__ import annotations

import re
from collections.abc import Iterator

from caramba.config.base import SLUG
from caramba.config.benchmark import (
    STAGED,
    AccuracyBenchmarkConfig,
    ControlsBenchmarkConfig,
    LatencyBenchmarkConfig,
    MemoryBenchmarkConfig,
    PerplexityBenchmarkConfig,
)
from caramba.config.decoding import check_custom_layers
from caramba.config.ladder import LadderConfig
from caramba.config.manifest import GroupConfig, Manifest, RunConfig
from caramba.config.model import ModelConfig, ModelSpec
from caramba.config.parallel_check import check_parallel
from caramba.config.surgery import attention_configs, check_surgery
from caramba.config.verify import CompareVerifyConfig, FidelityVerifyConfig, KVCacheVerifyConfig
from caramba.errors import ConfigError, quote

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
    check_surgery(model)
    check_parallel(manifest)
    check_custom_layers(manifest)
    for group in manifest.groups_to_run():
        for run in group.runs:
            if run.verify and model.teacher is None:
                raise ConfigError(
                    f"run {run.id!r}: verify {run.verify[0].type} compares with a teacher, and the model has none; "
                    "choose verify=none or a model with a teacher (model=tiny_dba)"
                )
            _check_run(manifest, model, teacher, run)
            _check_trainer(manifest, run)
        for bench in group.benchmarks:
            if isinstance(bench.config, ControlsBenchmarkConfig) and model.teacher is None:
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: controls are made from a teacher, and the model has none; choose a "
                    "model with a teacher (model=tiny_dba), or remove the benchmark"
                )
            if isinstance(bench.config, STAGED) and not re.match(SLUG, bench.id):
                raise ConfigError(
                    f"benchmark {quote(bench.id)}: its {bench.config.type} names files after it; use letters, digits, "
                    "'_', '-' and '.'"
                )
        specs = {"student": model, "teacher": teacher}
        _check_positions(group, specs)
        _check_dynamic_scaling(group, specs)


def _check_trainer(manifest: Manifest, run: RunConfig) -> None:
    trainer, phase = manifest.trainer, run.train
    if phase is None:
        return
    for key in trainer.needs_validation:
        if phase.eval_every is None or phase.eval_every > phase.steps:
            raise ConfigError(
                f"trainer.{key} goes by the held-out loss, and run {run.id!r} of {phase.steps} steps never measures it "
                f"(eval_every={phase.eval_every}); set settings.eval_iters={max(1, phase.steps // 10)}"
            )
    if trainer.save_last_k and phase.save_every is None:
        raise ConfigError(
            f"trainer.save_last_k: run {run.id!r} has no save_every; set settings.save_every=STEPS"
        )
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
        needed = BYTE_VOCABULARY if data.type == "stdlib" and data.tokenizer == "byte" else data.vocab_size
        if needed is None:
            continue
        is_exact = data.type == "stdlib" and data.tokenizer == "bpe"
        if needed > vocab or (is_exact and needed != vocab):
            raise ConfigError(
                f"model.embedder.vocab_size={vocab} does not fit the data of group {group.name!r}: vocab_size={needed} "
                f"(type {data.type}, tokenizer {data.tokenizer}). Make model.embedder.vocab_size and "
                "data.vocab_size equal, or give tokens made for this model (data=tokens data.path=…)"
            )


def _check_run(manifest: Manifest, model: ModelConfig, teacher: ModelSpec | None, run: RunConfig) -> None:
    phase = run.train
    if phase is None:
        return
    if manifest.model.teacher is None:
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
            limits = [
                scaling.original_max_position_embeddings for scaling in scalings if scaling.type == "dynamic"
            ]
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
        elif isinstance(config, ControlsBenchmarkConfig | LadderConfig):
            yield owner, "block_size", config.block_size, both
        elif isinstance(config, LatencyBenchmarkConfig):
            yield owner, LONGEST_GENERATION, _longest_generation(config), bench.models
        elif isinstance(config, MemoryBenchmarkConfig):
            yield owner, "longest of sequence_lengths", max(config.sequence_lengths), bench.models
        elif isinstance(config, AccuracyBenchmarkConfig) and config.max_length is not None:
            yield owner, "max_length", config.max_length, bench.models
