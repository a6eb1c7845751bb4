"""What an experiment will cost, before it runs and without torch: widths, FLOPs, bytes, memory, stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from caramba.config.cost import Cost, Width, WidthError
from caramba.config.estimate.fit import FitResult, FitRow, fit
from caramba.config.estimate.memory import (
    MemoryEstimate,
    ParallelLayout,
    PhaseEstimate,
    estimate_phase,
    rank_bytes,
)
from caramba.config.estimate.model import ModelCost, check_widths, model_cost
from caramba.config.estimate.planning import CacheRow, ExperimentPlan, StagePlan, plan
from caramba.config.estimate.variants import check_variants, variant

if TYPE_CHECKING:
    from caramba.config.estimate.export import as_json
    from caramba.config.estimate.rendering import render, render_text

__all__ = [
    "CacheRow",
    "Cost",
    "ExperimentPlan",
    "FitResult",
    "FitRow",
    "MemoryEstimate",
    "ModelCost",
    "ParallelLayout",
    "PhaseEstimate",
    "StagePlan",
    "Width",
    "WidthError",
    "as_json",
    "check_variants",
    "check_widths",
    "estimate_phase",
    "fit",
    "model_cost",
    "plan",
    "rank_bytes",
    "render",
    "render_text",
    "variant",
]

# Rich takes a while to import, and a launch that only checks widths prints nothing with it.
_LAZY = {
    "as_json": "caramba.config.estimate.export",
    "render": "caramba.config.estimate.rendering",
    "render_text": "caramba.config.estimate.rendering",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
