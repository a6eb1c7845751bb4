"""The schema of a manifest, and everything about it that needs no torch. Names load on first use."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "base": ("Config", "Later"),
    "benchmark": (
        "BenchmarkConfig",
        "LatencyBenchmarkConfig",
        "MemoryBenchmarkConfig",
        "PerplexityBenchmarkConfig",
    ),
    "crosscheck": ("cross_check",),
    "data": ("DataConfig",),
    "cost": ("AttentionWork", "Cost", "Width", "WidthError", "expect_width", "layer_cost"),
    "extension": (
        "CallbackConfig",
        "LossConfig",
        "MetricLoggerConfig",
        "OptimizerConfig",
        "ScheduleConfig",
    ),
    "kvcache": ("KVCacheKind",),
    "later": ("refuse_unbuilt",),
    "layer": (
        "AttentionLayerConfig",
        "AttentionMode",
        "DropoutLayerConfig",
        "LayerConfig",
        "LayerNormLayerConfig",
        "LinearLayerConfig",
        "Positive",
        "Probability",
        "RMSNormLayerConfig",
        "RopeScalingConfig",
        "SwiGLULayerConfig",
    ),
    "manifest": ("DebugConfig", "GroupConfig", "LoggerConfig", "Manifest", "RunConfig", "SettingsConfig"),
    "model": ("EmbedderConfig", "HeadConfig", "ModelConfig", "ModelSpec", "SurgeryConfig", "TeacherConfig"),
    "node": ("NodeConfig", "parse_node"),
    "parse": ("parse_manifest",),
    "plugins": ("PluginConfig",),
    "topology": (
        "BranchingTopologyConfig",
        "CyclicTopologyConfig",
        "NestedTopologyConfig",
        "ParallelTopologyConfig",
        "RecurrentTopologyConfig",
        "ResidualTopologyConfig",
        "SequentialTopologyConfig",
        "StackedTopologyConfig",
        "TopologyConfig",
    ),
    "train": ("PhaseConfig",),
    "eval_cases": ("ChoiceLogprobCase", "EvalThresholds", "EvalVerifyConfig", "IntGreedyCase"),
    "verify": ("CompareVerifyConfig", "FidelityVerifyConfig", "KVCacheVerifyConfig", "VerifyConfig"),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
