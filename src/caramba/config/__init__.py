"""The schema of a manifest, and everything about it that needs no torch. Names load on first use."""

from __future__ import annotations

from caramba.exports import lazy_exports

_HOMES = {
    "base": ("Config", "Later"),
    "benchmark": (
        "BenchmarkConfig",
        "LatencyBenchmarkConfig",
        "MemoryBenchmarkConfig",
        "PerplexityBenchmarkConfig",
    ),
    "crosscheck": ("cross_check", "refuse_unbuilt"),
    "data": ("DataConfig",),
    "cost": ("AttentionWork", "Cost", "Width", "WidthError", "expect_width", "layer_cost"),
    "extension": (
        "CallbackConfig",
        "DataSourceConfig",
        "LossConfig",
        "MetricLoggerConfig",
        "NodeConfig",
        "OptimizerConfig",
        "OwnBenchmarkConfig",
        "OwnCheckConfig",
        "ScheduleConfig",
        "parse_node",
    ),
    "kvcache": ("KVCacheKind",),
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
    "manifest": (
        "DebugConfig",
        "GroupConfig",
        "LoggerConfig",
        "Manifest",
        "RunConfig",
        "SettingsConfig",
        "parse_manifest",
    ),
    "model": ("EmbedderConfig", "HeadConfig", "ModelConfig", "ModelSpec", "SurgeryConfig", "TeacherConfig"),
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
    "verify": (
        "ChoiceLogprobCase",
        "CompareVerifyConfig",
        "EvalThresholds",
        "EvalVerifyConfig",
        "FidelityVerifyConfig",
        "IntGreedyCase",
        "KVCacheVerifyConfig",
        "VerifyConfig",
    ),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = lazy_exports(__name__, _HOMES)
