"""Measured plans kept for the next run: one readable file per signature, in a folder that can be deleted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.runs.files import home
from caramba.runtime.runtime_plan import RuntimePlan, load_plan, write_plans

FOLDER = "runtime_plans"
# Neither speed nor memory depends on these, so that a sweep over them measures once. Steps count only where the time of
# compilation counts.
IMMATERIAL = (
    "lr",
    "seed",
    "betas",
    "weight_decay",
    "scheduler",
    "warmup_steps",
    "min_lr_ratio",
    "temperature",
    "save_every",
    "eval_every",
    "cache_teacher_outputs",
    "teacher_cache_max_gb",
    "teacher_logits",
    "lr_scaling",
    "lr_base_batch",
    "decay_ratio",
    "momentum",
    "kl_weight",
)


def signature_of(phase: PhaseConfig, facts: Mapping[str, Any], **context: Any) -> str:
    """Return the key of a plan: SHA-256 of the machine's facts, the phase's config and what else it runs on."""
    has_steps = phase.compile_model == "auto"
    plain = phase.model_dump(mode="json", exclude={*IMMATERIAL, *(() if has_steps else ("steps",))})
    text = json.dumps([dict(facts), plain, context], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_path(signature: str) -> Path:
    """Return the file of a cached plan: `runtime_plans/SIGNATURE.json` of the caches' folder."""
    return home() / FOLDER / f"{signature[:16]}.json"


def cached_plan(signature: str) -> RuntimePlan | None:
    """Return what was measured under a signature. A file that is damaged or another's is left out with a warning."""
    path = plan_path(signature)
    if not path.is_file():
        return None
    try:
        (found,) = load_plan(path).values()
    except (ConfigError, ValueError, OSError) as error:
        logger.warning(f"{path}: not a plan ({error}); measuring again")
        return None
    if found.signature != signature:
        logger.warning(f"{path}: made for another machine or manifest; measuring again")
        return None
    return found


def store_plan(made: RuntimePlan) -> Path:
    """Keep a measured plan for the next run of its signature, in place of any before."""
    path = plan_path(made.signature)
    write_plans(path, {made.phase: made})
    return path
