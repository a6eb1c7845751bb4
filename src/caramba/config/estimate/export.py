"""A plan as JSON: plain numbers with the unit in each name."""

from __future__ import annotations

import dataclasses
from typing import Any

from caramba.config.cost import Cost, Unknown, Width
from caramba.config.estimate.fit import FitResult
from caramba.config.estimate.model import ModelCost
from caramba.config.estimate.planning import CacheRow, ExperimentPlan, StagePlan
from caramba.config.estimate.units import exact
from caramba.config.kvcache import KVCacheKind

SCHEMA = 1


def as_json(plan: ExperimentPlan) -> dict[str, Any]:
    """Return the plan as a mapping that `json.dumps` takes; fractions become exact integers or floats."""
    return {
        "schema": SCHEMA,
        "name": plan.name,
        "command": plan.command,
        "context": plan.context,
        "student": _model(plan.student, plan.context),
        "teacher": None if plan.teacher is None else _model(plan.teacher, plan.context),
        "teacher_checkpoint": plan.teacher_source,
        "cache": [_cache(row) for row in plan.cache],
        "stages": [_stage(stage) for stage in plan.stages],
        "benchmarks": list(plan.benchmarks),
        "notes": list(plan.notes),
        "fit": None if plan.fit is None else _fit(plan.fit),
    }


def _fit(fit: FitResult) -> dict[str, Any]:
    return {
        "target_params": fit.target_params,
        "params": fit.params,
        "error": fit.error,
        "block_size": fit.block_size,
        "derivation": [dataclasses.asdict(row) for row in fit.rows],
    }


def _model(model: ModelCost, context: int) -> dict[str, Any]:
    """A figure that a custom layer does not declare is null; `undeclared` names these layers."""
    has_work, has_activations = not model.undeclared("flops"), not model.undeclared("activations")
    kinds: tuple[Unknown, ...] = ("flops", "activations", "cache")
    return {
        "name": model.name,
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "tied_head": model.tied,
        "params": model.params,
        "params_per_part": model.params_per_part,
        "flops_per_token": model.flops_per_token(context) if has_work else None,
        "training_flops_per_token": model.training_flops_per_token(context) if has_work else None,
        "decode_flops_per_token": model.decode_flops_per_token(context) if has_work else None,
        "activation_elements_per_token": model.activation_elements if has_activations else None,
        "kv_elements_per_token": model.topology.kv_elements_per_token,
        "kv_first_bytes_per_sequence_fp16": model.first_bytes(KVCacheKind.FP16),
        "undeclared": {kind: list(model.undeclared(kind)) for kind in kinds},
        "topology": _node(model.topology),
    }


def _node(cost: Cost) -> dict[str, Any]:
    node: dict[str, Any] = {
        "type": cost.type,
        "label": cost.label,
        "width_in": _width(cost.width_in),
        "width_out": _width(cost.width_out),
        "params": cost.params,
        "matmul_params_used": cost.matmul_params_used,
        "attention_width": cost.attention_width,
        "activation_elements_per_token": cost.activation_elements,
    }
    if cost.children:
        node |= {
            "repeat": cost.repeat,
            "shared": cost.shared,
            "layers": [_node(child) for child in cost.children],
        }
    elif cost.kv:
        node["cached_streams"] = [{"name": name, "heads": heads, "width": width} for name, heads, width in cost.kv[0]]
    return node


def _width(width: Width) -> dict[str, int | None]:
    return {"d_model": width.d_model, "stack": width.stack}


def _cache(row: CacheRow) -> dict[str, Any]:
    teacher = row.teacher_total
    return {
        "kind": str(row.kind),
        "student_bytes_per_token_layer": [exact(size) for size in row.student_layers],
        "student_bytes_per_token": exact(row.student_total),
        "teacher_bytes_per_token_layer": row.teacher_layers and [exact(size) for size in row.teacher_layers],
        "teacher_bytes_per_token": None if teacher is None else exact(teacher),
        "ratio_student_over_teacher": None if row.ratio is None else float(row.ratio),
    }


def _stage(stage: StagePlan) -> dict[str, Any]:
    values = {field.name: getattr(stage, field.name) for field in dataclasses.fields(stage) if field.name != "estimate"}
    estimate = stage.estimate
    memory = None
    if estimate is not None:
        total = None if estimate.uncounted else estimate.memory.total_bytes
        memory = dataclasses.asdict(estimate.memory) | {"total_bytes": total}
        memory["activations_bytes"] = None if estimate.uncounted else memory["activations_bytes"]
    return values | {
        "trained_params": estimate and estimate.trained_params,
        "flops_per_token": estimate and estimate.flops_per_token,
        "memory": memory,
        "memory_leaves_out": list(estimate.uncounted) if estimate is not None else [],
    }
