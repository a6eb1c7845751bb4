"""What each phase minimises, built from its config: objective, block schedule, teacher's outputs, low-rank updates."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from caramba.config.crosscheck import custom_layers_by_role
from caramba.config.extension import ExtensionConfig
from caramba.config.manifest import GroupConfig, Manifest, RunConfig
from caramba.config.surgery import keeps_copied
from caramba.config.topology import attention_configs
from caramba.config.train import BLOCK_PHASES, LoraConfig, PhaseConfig
from caramba.console import logger
from caramba.distill import (
    TAIL_SAMPLES,
    BlockSchedule,
    BlockShard,
    BlockwiseObjective,
    LanguageModelObjective,
    Lora,
    Objective,
    TeacherCache,
    TeacherLogitsObjective,
    bytes_per_token,
    n_entries,
    refuse_over_cap,
)
from caramba.errors import ConfigError
from caramba.experiment.session import Session, StageLedger
from caramba.model import Model, build_model, model_hash, pair_attention
from caramba.model.topology import build_node
from caramba.runtime import RuntimePlan, choose_device, choose_precision, get_world_size
from caramba.train.data import windows_at


def build_objective(session: Session, phase: PhaseConfig, decided: RuntimePlan, model: Model) -> Objective:
    """Return what a phase minimises on `model`."""
    if phase.phase in BLOCK_PHASES:
        return _blockwise(session, phase, decided, model)
    lora = phase.lora and _lora(model, phase.lora)
    if phase.loss is not None:
        from caramba.config.extension import build_extension
        from caramba.distill.objective import PluginLossObjective

        return PluginLossObjective(model, build_extension(phase.loss, phase.loss), name=phase.loss.type, lora=lora)
    if phase.objective == "ce":
        return LanguageModelObjective(model, chunk=phase.vocab_chunk, lora=lora, dense=phase.cross_entropy == "dense")
    teacher = frozen_teacher(session, decided)
    stored = phase.teacher_logits
    return TeacherLogitsObjective(
        model,
        teacher,
        kl_weight=1.0 if phase.objective == "kl" else phase.kl_weight,
        temperature=phase.temperature,
        chunk=phase.vocab_chunk,
        lora=lora,
        cache=_logits_cache(session, phase, decided),
        top_k=phase.teacher_top_k if stored is None else stored.top_k,
        tail_samples=TAIL_SAMPLES if stored is None else stored.tail_samples,
        half=stored is not None,
        tail=stored is None or stored.tail,
        hidden_weight=phase.hidden_weight,
    )


def _lora(model: Model, config: LoraConfig) -> Lora:
    return Lora(model, rank=config.rank, alpha=config.alpha, targets=config.targets, dropout=config.dropout)


def _blockwise(session: Session, phase: PhaseConfig, decided: RuntimePlan, model: Model) -> BlockwiseObjective:
    teacher = frozen_teacher(session, decided)
    pairs = pair_attention(teacher, model)
    shard = _shard(session, [name for name, _, _ in pairs])
    return BlockwiseObjective(
        model,
        teacher,
        pairs,
        schedule=_block_schedule(phase, shard),
        on_student=phase.phase == "drift",
        attention_weight=phase.attention_kl,
        n_queries=phase.attention_queries,
        keeps_copied=keeps_copied(phase, session.manifest.model, session.group),
        cache=_cache(session, phase, decided),
        shard=shard,
    )


def frozen(model: nn.Module) -> Model:
    """Return the model in eval mode without gradients."""
    assert isinstance(model, Model)
    return model.eval().requires_grad_(False)


def frozen_teacher(session: Session, decided: RuntimePlan) -> Model:
    """Return the teacher of a phase: the session's, or a copy in the 16 bits that the phase computes in."""
    teacher = frozen(session.model_of("teacher"))
    dtype = getattr(torch, decided.value("dtype"))
    if dtype == torch.float32 or all(value.dtype == dtype for value in teacher.parameters()):
        return teacher
    # The copy takes these in place of its parameters, so that no second set of float32 weights is ever allocated.
    memo: dict[int, object] = {
        id(value): nn.Parameter(value.to(dtype), requires_grad=False) for value in teacher.parameters()
    }
    return copy.deepcopy(teacher, memo).to(dtype)


def _entries(phase: PhaseConfig, vocab_size: int) -> tuple[int, int]:
    stored = phase.teacher_logits
    if stored is None:
        return n_entries(phase.teacher_top_k, TAIL_SAMPLES, vocab_size)
    return n_entries(stored.top_k, stored.tail_samples, vocab_size, tail=stored.tail)


def _logits_cache(session: Session, phase: PhaseConfig, decided: RuntimePlan) -> TeacherCache | None:
    top_k, samples = _entries(phase, session.manifest.model.embedder.vocab_size)
    key = {"top_k": top_k, "tail_samples": samples, "temperature": phase.temperature}
    return _cache(session, phase, decided, **key)


def _cache(session: Session, phase: PhaseConfig, decided: RuntimePlan, **key: object) -> TeacherCache | None:
    if not phase.stores_teacher:
        return None
    stored = phase.teacher_logits
    whole = {
        "teacher": model_hash(session.model_of("teacher")),
        "data": session.corpus.fingerprint,
        "packing": [session.corpus.packing, session.group.data.keeps_documents_apart],
        "split": "train",
        "block_size": phase.block_size,
        "dtype": decided.value("dtype"),
        "outputs": "attention" if phase.phase in BLOCK_PHASES else "sampled",
        **key,
    }
    if stored is None:
        return TeacherCache(whole)
    whole |= {"tokenizer": session.tokenizer_hash, "tail": stored.tail}
    return TeacherCache.at(Path(stored.path).expanduser(), whole, f"train.phases.{phase.phase}.teacher_logits.path")


def check_block_schedules(session: Session) -> None:
    """Refuse phases that have fewer steps than blocks to train in turn, before anything is trained.

    Raises:
        ConfigError: naming the steps that the phase takes at least, or fewer blocks than ranks.
    """
    for run, phase in session.group.trained:
        if phase.phase in BLOCK_PHASES and run.id not in session.ledger:
            blocks = range(len(attention_configs(session.manifest.model.topology)))
            _block_schedule(phase, _shard(session, [f"block {block}" for block in blocks]))


def check_lora_targets(session: Session) -> None:
    """Refuse low-rank updates of layers that the student does not have, before anything is trained.

    Raises:
        ConfigError: naming the linear layers that there are.
    """
    for run, phase in session.group.trained:
        if phase.lora is not None and phase.trains == "student" and run.id not in session.ledger:
            _lora(build_model(session.manifest.model, device="meta"), phase.lora)


def check_precisions(manifest: Manifest, group: GroupConfig, ledger: StageLedger) -> None:
    """Refuse phases that ask for what their device lacks, before anything is read or trained.

    Raises:
        ConfigError: naming what the device has.
    """
    for run, phase in group.trained:
        if run.id not in ledger:
            choose_precision(phase, choose_device(phase.device or manifest.device))


def _shard(session: Session, names: Sequence[str]) -> BlockShard:
    """Return the blocks that this rank trains: its part of them under parallel.blockwise=blocks, else all."""
    if session.manifest.parallel.blockwise == "blocks":
        return BlockShard(names)
    return BlockShard(names, rank=0, world_size=1)


def _block_schedule(phase: PhaseConfig, shard: BlockShard) -> BlockSchedule:
    return BlockSchedule(
        shard.owned,
        steps=phase.steps,
        is_sequential=phase.schedule == "sequential",
        convergence=phase.convergence,
    )


def check_teacher_caches(session: Session) -> None:
    """Say what every phase that keeps its teacher's outputs will write, before anything is trained.

    Raises:
        ConfigError: a phase would write more than its teacher_cache_max_gb.
    """
    for run, phase in session.group.trained:
        if not phase.stores_teacher or run.id in session.ledger:
            continue
        decided = session.plan(phase, run.id)
        if phase.teacher_logits is not None:
            _check_store(session, run, phase, decided)
            continue
        samples = _n_windows(session, phase)
        refuse_over_cap(run.id, samples, _sample_bytes(session, phase, decided), phase.teacher_cache_max_gb)


def _n_windows(session: Session, phase: PhaseConfig) -> int:
    """Return how many windows a phase reads, each counted once."""
    assert isinstance(phase.batch_size, int)
    reads = phase.steps * phase.batch_size * phase.gradient_accumulation_steps * get_world_size()
    return min(reads, len(session.training_windows(phase)))


def count_missing_logits(session: Session, run: RunConfig, phase: PhaseConfig, decided: RuntimePlan) -> int:
    """Return how many of a phase's windows have no stored teacher logits: the teacher runs for these alone.

    Raises:
        ConfigError: the store is of another teacher, text or setting.
    """
    store = _logits_cache(session, phase, decided)
    assert store is not None
    return _count_missing(store, session, run, phase)


def _count_missing(store: TeacherCache, session: Session, run: RunConfig, phase: PhaseConfig) -> int:
    windows = windows_at(
        session.training_windows(phase),
        seed=session.stream_seed(run),
        start=session.stream_start(run),
        samples=_n_windows(session, phase),
    )
    return sum(not store.has_sample(window) for window in windows)


def _check_store(session: Session, run: RunConfig, phase: PhaseConfig, decided: RuntimePlan) -> None:
    """Refuse a store of another teacher, text or setting, and one that the disk has no room for."""
    store = _logits_cache(session, phase, decided)
    assert store is not None
    missing, samples = _count_missing(store, session, run, phase), _n_windows(session, phase)
    size, free = missing * _sample_bytes(session, phase, decided), shutil.disk_usage(store.folder).free
    if size > free:
        raise ConfigError(
            f"{run.id}: teacher_logits writes {size / 1e9:.2f} GB to {store.folder}, which has {free / 1e9:.2f} GB "
            "free; lower top_k, train on fewer windows, or name a folder with more room"
        )
    logger.info(
        f"{run.id}: teacher logits of {samples:,} windows, {samples - missing:,} stored, {missing:,} to write "
        f"({size / 1e9:.2f} GB) in {store.folder}"
    )


def _sample_bytes(session: Session, phase: PhaseConfig, decided: RuntimePlan) -> int:
    """Bytes of one sample's file: inputs and outputs of every attention layer, or k logits and their entries."""
    spec = session.manifest.model
    if phase.phase not in BLOCK_PHASES:
        vocab_size, half = spec.embedder.vocab_size, phase.teacher_logits is not None
        return phase.block_size * bytes_per_token(sum(_entries(phase, vocab_size)), vocab_size, half=half)
    width = getattr(torch, decided.value("dtype")).itemsize
    return math.prod((len(attention_configs(spec.topology)), 2, phase.block_size, spec.embedder.d_model, width))


def check_builds(manifest: Manifest) -> None:
    """Build every custom layer that a manifest describes, on the meta device, and import its extensions.

    Raises:
        ConfigError: a target that is no torch module, a constructor that fails, or parameters other than declared, with
            the layer's path; or an extension that is not of its kind, with the expected signature.
    """
    for layers in custom_layers_by_role(manifest).values():
        for path, layer in layers:
            try:
                with torch.device("meta"):
                    build_node(layer)
            except ConfigError as error:
                raise ConfigError(f"{path}: {error}") from error.__cause__
    if manifest.logger.lightning:
        from caramba.train.loggers.named import check_named_loggers

        check_named_loggers(manifest.logger.lightning)
    for extension in _extensions(manifest):
        from caramba.config.extension import load_class

        load_class(extension)


def _extensions(manifest: Manifest) -> Iterator[ExtensionConfig]:
    yield from (*manifest.callbacks, *manifest.logger.extra)
    for group in manifest.groups_to_run():
        checks = [check for run in group.runs for check in run.verify]
        benches = [bench.config for bench in group.benchmarks]
        of_phases = [x for _, phase in group.trained for x in (phase.loss, phase.optimizer, phase.scheduler)]
        for extension in (group.data.source, *benches, *checks, *of_phases):
            if isinstance(extension, ExtensionConfig):
                yield extension
