"""What surgery can do, decided from the schemas alone: refused before any work, with the nearest possible."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import gcd
from typing import Any

from caramba.config.attention import AttentionLayerConfig
from caramba.config.attention_dims import AttentionMode
from caramba.config.manifest import GroupConfig
from caramba.config.memory_bank import MemoryBankLayerConfig
from caramba.config.model import ModelConfig, ModelSpec, SurgeryConfig
from caramba.config.topology import TopologyConfig, attention_configs
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.errors import ConfigError

BYTES_PER_ELEMENT = 2  # budgets are stated at 16 bits
_TEACHER_PARTS = {
    "qk_norm": "it normalises each key by its own length, which no linear map gives",
    "null_attn": "the student has no place for the null key's logit",
    "learned_temperature": "it is not mapped",
}
_FREE_WITH_MEMORY = {
    *("type", "mode", "n_heads", "n_kv_heads", "head_dim", "attn_dim", "v_dim"),
    *("local_window", "q_chunk", "dropout"),
}
"""Keys in which a memory layer may differ from its teacher's attention: names of the heads that `dims` compares, and
what changes no weight."""
_STUDENT_PARTS = ("qk_norm", "null_attn", "tie_qk", "rope_semantic")


def makes_student(model: ModelConfig, group: GroupConfig) -> bool:
    """Return whether surgery makes the student that a group trains first or measures."""
    phases = [run.train.phase for run in group.runs if run.train and run.train.trains in ("student", None)]
    is_made = phases[0] != "pretrain" if phases else bool(group.benchmarks)
    return is_made and model.teacher is not None and model.path is None and model.checkpoint is None


def keeps_copied(phase: PhaseConfig, model: ModelConfig, group: GroupConfig) -> bool:
    """Return whether a phase leaves the weights of latent layers as they are that surgery copied, W_q and W_o."""
    if phase.trainable != "auto":
        return phase.trainable == "maps"
    surgery = model.surgery or SurgeryConfig()
    return (
        phase.phase in BLOCK_PHASES
        and makes_student(model, group)
        and surgery.method != "random"
        and any(layer.is_latent for layer in attention_configs(model.topology))
    )


def check_surgery(model: ModelConfig) -> None:
    """Check that a model's surgery can be done, as far as its teacher is described.

    Raises:
        ConfigError: widths that contradict the attention's, a part that no method maps, or an impossible budget.
    """
    if model.teacher is None:
        return
    surgery = model.surgery or SurgeryConfig()
    ours = attention_configs(model.topology)
    _check_stated_widths(surgery, ours)
    _check_target(surgery, ours)
    _check_formats(surgery, ours)
    if model.teacher.manifest is None:
        return
    theirs = attention_configs(model.teacher.manifest.topology)
    if len(theirs) != len(ours):
        raise ConfigError(
            f"model.topology: the student has {len(ours)} attention layers, its teacher {len(theirs)}; make them equal"
        )
    for teacher, student in zip(theirs, ours, strict=True):
        if teacher != student:
            check_pair(teacher, student, surgery)
    if surgery.kv_budget_bytes is not None:
        _check_budget(surgery, theirs, ours)


def check_pair(teacher: AttentionLayerConfig, student: AttentionLayerConfig, surgery: SurgeryConfig) -> None:
    """Check that `surgery.method` can make this student layer from this teacher layer.

    Raises:
        ConfigError: naming the part that is not mapped and what to change.
    """
    if surgery.method == "random":
        return
    if surgery.method == "memory":
        _check_memory(teacher, student)
        return
    for config, role in ((teacher, "teacher"), (student, "student")):
        if isinstance(config, MemoryBankLayerConfig):
            raise ConfigError(
                f"surgery.method={surgery.method} knows no memory slots, got a MemoryBankLayer as {role}; use "
                "method: random, or an AttentionLayer"
            )
    where = f"surgery.method={surgery.method}"
    if teacher.mode is AttentionMode.DECOUPLED:
        raise ConfigError(f"{where}: starts from standard, gqa or bottleneck attention, got a decoupled teacher")
    _check_shapes(where, teacher, student)
    if surgery.method == "copy":
        _check_copy(where, teacher, student)
        return
    _check_parts(where, teacher, student)
    if surgery.method == "weight_svd" and student.layout == "per_head":
        for config, role in ((teacher, "teacher"), (student, "student")):
            if config.bias:
                raise ConfigError(
                    f"{where}: the {role}'s bias is not mapped by this method; set bias: false, or use method: dba"
                )
    if surgery.kv_budget_bytes is None:
        _check_widths(where, teacher, student)


def _check_memory(teacher: AttentionLayerConfig, student: AttentionLayerConfig) -> None:
    """Check that a memory layer has all weights of its teacher's attention, which must compute the same in a window."""
    where = "surgery.method=memory"
    for config, role, wanted in (
        (teacher, "teacher", "AttentionLayer"),
        (student, "student", "MemoryBankLayer"),
    ):
        if config.type != wanted or config.mode not in (AttentionMode.STANDARD, AttentionMode.GQA):
            raise ConfigError(
                f"{where}: the {role} needs a {wanted} of mode standard or gqa, got a {config.type} of mode "
                f"{config.mode}; change the {role}, or the method"
            )
    if student.dims() != teacher.dims():
        raise ConfigError(
            f"{where}: copies the teacher's heads {teacher.dims()}, the student has {student.dims()}; make them equal"
        )
    for name in AttentionLayerConfig.model_fields.keys() - _FREE_WITH_MEMORY:
        if getattr(student, name) != getattr(teacher, name):
            raise ConfigError(
                f"{where}: {name} is {getattr(student, name)} in the student, {getattr(teacher, name)} in the teacher; "
                "use the teacher's"
            )
    if teacher.local_window is not None and (student.local_window or 0) > teacher.local_window:
        raise ConfigError(
            f"{where}: local_window={student.local_window} shows tokens that the teacher's window of "
            f"{teacher.local_window} hides; use at most that"
        )


def _check_shapes(where: str, teacher: AttentionLayerConfig, student: AttentionLayerConfig) -> None:
    if (student.d_model, student.n_heads) != (teacher.d_model, teacher.n_heads):
        raise ConfigError(
            f"{where}: the student has (d_model, heads) {(student.d_model, student.n_heads)}, the teacher "
            f"{(teacher.d_model, teacher.n_heads)}; make them equal"
        )
    if student.local_window != teacher.local_window:
        raise ConfigError(
            f"{where}: local_window is {student.local_window} in the student, {teacher.local_window} in the teacher; "
            "use one"
        )


def _check_parts(where: str, teacher: AttentionLayerConfig, student: AttentionLayerConfig) -> None:
    if student.mode is not AttentionMode.DECOUPLED:
        raise ConfigError(
            f"{where}: builds mode=decoupled, got mode={student.mode}; for fewer key/value heads use method: copy"
        )
    if not teacher.rope_enabled or not student.rope_enabled:
        role = "student" if teacher.rope_enabled else "teacher"
        raise ConfigError(f"{where}: splits keys by what RoPE turns, and the {role} has rope_enabled: false")
    if teacher.rope_scaling is not None and teacher.rope_scaling.type == "dynamic":
        raise ConfigError(
            f"{where}: the teacher's rope_scaling type=dynamic changes its frequencies with the length, and the "
            "student stores the ones it keeps; use a teacher with llama3, linear or yarn"
        )
    for name, reason in _TEACHER_PARTS.items():
        if getattr(teacher, name):
            raise ConfigError(
                f"{where}: the teacher's {name} cannot be transplanted: {reason}; use a teacher without it, or "
                "method: copy with fewer key/value heads (method: random initialises attention)"
            )
    for name in _STUDENT_PARTS:
        if getattr(student, name):
            raise ConfigError(f"{where}: the student's {name} is not what its teacher computes; set {name}: false")
    is_latent = student.layout == "latent"
    if is_latent and student.query_dim != teacher.dims().qk:
        raise ConfigError(
            f"{where}: the latent student's queries are {student.query_dim} wide, the teacher's {teacher.dims().qk}; "
            f"set head_dim: {teacher.dims().qk}"
        )
    kept = student.exact_first_tokens
    if kept and student.dims().n_kv_heads != teacher.dims().n_kv_heads:
        raise ConfigError(
            f"{where}: exact_first_tokens={kept} keeps the teacher's keys and values, of {teacher.dims().n_kv_heads} "
            f"heads, and the student has n_kv_heads={student.dims().n_kv_heads}; set n_kv_heads: "
            f"{teacher.dims().n_kv_heads}"
        )
    if not is_latent and student.dims().n_kv_heads != teacher.dims().n_kv_heads:
        raise ConfigError(
            f"{where}: layout=per_head: the student has {student.dims().n_kv_heads} key/value heads, the teacher "
            f"{teacher.dims().n_kv_heads}; make them equal"
        )
    holds = student.bias is True or (teacher.bias == "qkv" and student.bias == "qkv")
    if teacher.bias and not (holds or (is_latent and student.bias)):
        raise ConfigError(
            f"{where}: the teacher's projections have biases (bias: {teacher.bias}) and the student has bias: "
            f"{student.bias}; set the student's bias: {teacher.bias}"
        )


def first_tokens_apart(node: Any) -> int:
    """Return how many first tokens every decoupled layer of a topology keeps separate: statistics may skip them."""
    counts = [config.exact_first_tokens for config in attention_configs(node) if config.mode is AttentionMode.DECOUPLED]
    return min(counts, default=0)


def _check_widths(where: str, teacher: AttentionLayerConfig, student: AttentionLayerConfig) -> None:
    dims = teacher.dims()
    keys, values = dims.n_kv_heads * dims.qk, dims.n_kv_heads * dims.v
    most = {"sem_dim": keys, "geo_dim": keys, "v_dim": values}
    if student.layout == "latent":
        most = {"sem_dim": keys + values, "geo_dim": keys}
    for name, limit in most.items():
        width = getattr(student, name) or 0
        if width > limit:
            raise ConfigError(
                f"{where}: {name}={width} is wider than the teacher, which has {limit}; use at most {limit}"
            )


def _check_copy(where: str, teacher: AttentionLayerConfig, student: AttentionLayerConfig) -> None:
    if student.mode is AttentionMode.DECOUPLED:
        raise ConfigError(
            f"{where}: pools key/value heads, and decoupled attention has parts that no pooled head fills; give the "
            "student mode: gqa with fewer n_kv_heads, or use method: dba"
        )
    ours, theirs = student.dims(), teacher.dims()
    if theirs.n_kv_heads % ours.n_kv_heads:
        divisors = [n for n in range(1, theirs.n_kv_heads + 1) if theirs.n_kv_heads % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - ours.n_kv_heads))
        raise ConfigError(
            f"{where}: n_kv_heads={ours.n_kv_heads} does not divide the teacher's {theirs.n_kv_heads}; the nearest "
            f"possible is {nearest}"
        )
    for name in (
        "bias",
        "qk_norm",
        "rope_enabled",
        "rope_base",
        "rope_scaling",
        "null_attn",
        "learned_temperature",
    ):
        if getattr(student, name) != getattr(teacher, name):
            raise ConfigError(f"{where}: {name} differs between student and teacher; make it the teacher's")
    if (ours.qk, ours.v) != (theirs.qk, theirs.v):
        raise ConfigError(f"{where}: heads are {ours.qk} wide in the student, {theirs.qk} in the teacher; set head_dim")


def _check_target(surgery: SurgeryConfig, ours: list[AttentionLayerConfig]) -> None:
    """The target is that of every attention layer; engines have one set of widths for all layers."""
    for config in ours:
        if config.mode is AttentionMode.DECOUPLED and config.mla != (surgery.target == "mla"):
            raise ConfigError(
                f"model.surgery.target={surgery.target}, and an attention layer of the student has "
                f"mla={str(config.mla).lower()}; set mla: {str(not config.mla).lower()} in the attention, "
                "or change target"
            )
    if surgery.target == "mla" and surgery.kv_budget_bytes is not None:
        raise ConfigError(
            f"model.surgery.kv_budget_bytes={surgery.kv_budget_bytes} gives each layer widths of its own, and engines "
            "have one width for all layers of multi-head latent attention; set kv_budget_bytes: null with sem_dim and "
            "geo_dim, or target: caramba"
        )


def _check_formats(surgery: SurgeryConfig, ours: list[AttentionLayerConfig]) -> None:
    if not surgery.kv_budget_formats:
        return
    where = f"model.surgery.kv_budget_formats={list(surgery.kv_budget_formats)}"
    if surgery.kv_budget_bytes is None:
        raise ConfigError(f"{where}: chooses under a budget; set kv_budget_bytes, or remove it")
    if surgery.cache_format is not None or any(config.cache_format is not None for config in ours):
        raise ConfigError(
            f"{where}: the budget chooses the format, got cache_format={surgery.cache_format}; set cache_format: null"
        )
    if any(config.layout != "latent" for config in ours):
        raise ConfigError(f"{where}: measures layout: latent alone; set layout: latent, or remove it")


def _check_stated_widths(surgery: SurgeryConfig, ours: list[AttentionLayerConfig]) -> None:
    """The widths that `surgery` states are those of the attention; a budget chooses its own."""
    names = ("layout", "sem_dim", "geo_dim", "v_dim", "exact_first_tokens", "cache_format")
    for config in ours:
        for name in ("local_window", "memory_slots", "memory_first_tokens", "memory_slot_bias"):
            stated, found = getattr(surgery, name), getattr(config, name, None)
            if stated is not None and (surgery.method != "memory" or stated != found):
                raise ConfigError(
                    f"model.surgery.{name}={stated} is of method=memory, and an attention layer of the student has "
                    f"{name}={found} under method={surgery.method}; remove it from surgery, or make them equal"
                )
        for name in names if surgery.kv_budget_bytes is None else names[-2:]:
            stated, found = getattr(surgery, name), getattr(config, name)
            if config.mode is AttentionMode.DECOUPLED and stated is not None and stated != found:
                raise ConfigError(
                    f"model.surgery.{name}={stated}, and an attention layer of the student has {name}={found}; write "
                    f"{name}: ${{model.surgery.{name}}} in the attention, or remove it from surgery"
                )


def least_elements(config: AttentionLayerConfig) -> int:
    """Return the fewest elements that a decoupled layer can cache per token: one rotary pair and width 1 elsewhere."""
    kv_heads = config.dims().n_kv_heads
    return 3 if config.layout == "latent" else 4 * kv_heads


def _check_budget(surgery: SurgeryConfig, theirs: list[AttentionLayerConfig], ours: list[AttentionLayerConfig]) -> None:
    where = f"surgery.kv_budget_bytes={surgery.kv_budget_bytes}"
    budget = surgery.kv_budget_bytes or 0
    if surgery.method != "dba":
        raise ConfigError(f"{where}: widths are chosen by the measured error of method: dba, got {surgery.method}")
    fixed = [config.mode for config in ours if config.mode is not AttentionMode.DECOUPLED]
    if fixed:
        raise ConfigError(f"{where}: widths are chosen for decoupled attention, and a layer has mode={fixed[0]}")
    layout = surgery.layout
    other = next((config.layout for config in ours if layout is not None and config.layout != layout), None)
    if other is not None:
        raise ConfigError(
            f"model.surgery.layout={layout}, and an attention layer of the student has layout={other}; write "
            "layout: ${model.surgery.layout} in the attention, or remove it from surgery"
        )
    least = BYTES_PER_ELEMENT * sum(least_elements(config) for config in ours)
    most = BYTES_PER_ELEMENT * sum(config.dims().cached for config in theirs)
    if not least <= budget <= most:
        word = "below one rotary pair and one direction in each layer" if budget < least else "more than the teacher's"
        raise ConfigError(
            f"{where} (bytes per token over all {len(ours)} layers at 16 bits) is {word}; the nearest possible is "
            f"{least if budget < least else most}"
        )


def map_attention(node: Any, change: Callable[[AttentionLayerConfig], AttentionLayerConfig]) -> Any:
    """Return the tree with every attention layer changed; the names of its weights stay."""
    if isinstance(node, AttentionLayerConfig):
        return change(node)
    if not isinstance(node, TopologyConfig):
        return node
    return node.model_copy(update={"layers": tuple(map_attention(child, change) for child in node.layers)})


def fewer_kv_heads(teacher: ModelSpec, elements: int) -> ModelSpec:
    """Return the teacher with fewer key/value heads, its cache closest to `elements` per token over all layers.

    Heads are divided by one number; of two equally close caches the larger is taken.

    Raises:
        ConfigError: the teacher has decoupled attention, or the nearest possible is the teacher itself.
    """
    layers = attention_configs(teacher.topology)
    unpooled = [layer.mode for layer in layers if layer.mode not in (AttentionMode.STANDARD, AttentionMode.GQA)]
    if unpooled:
        raise ConfigError(
            f"control copy: pools the heads of standard or gqa attention, got a teacher with mode={unpooled[0]}; leave "
            "copy out of `controls`"
        )
    cached = sum(layer.dims().cached for layer in layers)
    most = reduce(gcd, (layer.dims().n_kv_heads for layer in layers))
    factors = [factor for factor in range(1, most + 1) if most % factor == 0]
    factor = min(factors, key=lambda item: abs(cached / item - elements))
    if factor == 1:
        raise ConfigError(
            f"control copy: {elements} cached elements per token are nearest to the teacher's own {cached}, so "
            f"no head is pooled; the next possible is {cached // factors[1] if len(factors) > 1 else 'none'}"
        )

    def pool_kv_heads(layer: AttentionLayerConfig) -> AttentionLayerConfig:
        dims = layer.dims()
        return AttentionLayerConfig.model_validate(
            {
                **layer.model_dump(mode="json"),
                "mode": "gqa",
                "head_dim": dims.qk,
                "n_kv_heads": dims.n_kv_heads // factor,
            }
        )

    return teacher.model_copy(update={"topology": map_attention(teacher.topology, pool_kv_heads)})
