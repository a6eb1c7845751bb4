"""The schema of a manifest, and everything about it that needs no torch. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.config.base import Config as Config
    from caramba.config.base import Probability as Probability
    from caramba.config.benchmark import BenchmarkConfig as BenchmarkConfig
    from caramba.config.benchmark import LatencyBenchmarkConfig as LatencyBenchmarkConfig
    from caramba.config.benchmark import MemoryBenchmarkConfig as MemoryBenchmarkConfig
    from caramba.config.benchmark import PerplexityBenchmarkConfig as PerplexityBenchmarkConfig
    from caramba.config.cost import AttentionWork as AttentionWork
    from caramba.config.cost import Cost as Cost
    from caramba.config.cost import Width as Width
    from caramba.config.cost import WidthError as WidthError
    from caramba.config.cost import expect_width as expect_width
    from caramba.config.cost import layer_cost as layer_cost
    from caramba.config.crosscheck import cross_check as cross_check
    from caramba.config.data import DataConfig as DataConfig
    from caramba.config.extension import CallbackConfig as CallbackConfig
    from caramba.config.extension import DataSourceConfig as DataSourceConfig
    from caramba.config.extension import LossConfig as LossConfig
    from caramba.config.extension import MetricLoggerConfig as MetricLoggerConfig
    from caramba.config.extension import NodeConfig as NodeConfig
    from caramba.config.extension import OptimizerConfig as OptimizerConfig
    from caramba.config.extension import OwnBenchmarkConfig as OwnBenchmarkConfig
    from caramba.config.extension import OwnCheckConfig as OwnCheckConfig
    from caramba.config.extension import ScheduleConfig as ScheduleConfig
    from caramba.config.extension import parse_node as parse_node
    from caramba.config.kvcache import KVCacheKind as KVCacheKind
    from caramba.config.layer import AttentionLayerConfig as AttentionLayerConfig
    from caramba.config.layer import AttentionMode as AttentionMode
    from caramba.config.layer import DropoutLayerConfig as DropoutLayerConfig
    from caramba.config.layer import LayerNormLayerConfig as LayerNormLayerConfig
    from caramba.config.layer import LinearLayerConfig as LinearLayerConfig
    from caramba.config.layer import RMSNormLayerConfig as RMSNormLayerConfig
    from caramba.config.layer import SwiGLULayerConfig as SwiGLULayerConfig
    from caramba.config.layer_base import LayerConfig as LayerConfig
    from caramba.config.layer_base import Positive as Positive
    from caramba.config.layer_base import RopeScalingConfig as RopeScalingConfig
    from caramba.config.manifest import DebugConfig as DebugConfig
    from caramba.config.manifest import GroupConfig as GroupConfig
    from caramba.config.manifest import LoggerConfig as LoggerConfig
    from caramba.config.manifest import Manifest as Manifest
    from caramba.config.manifest import RunConfig as RunConfig
    from caramba.config.manifest import SettingsConfig as SettingsConfig
    from caramba.config.manifest import parse_manifest as parse_manifest
    from caramba.config.model import EmbedderConfig as EmbedderConfig
    from caramba.config.model import HeadConfig as HeadConfig
    from caramba.config.model import ModelConfig as ModelConfig
    from caramba.config.model import ModelSpec as ModelSpec
    from caramba.config.model import SurgeryConfig as SurgeryConfig
    from caramba.config.model import TeacherConfig as TeacherConfig
    from caramba.config.plugins import PluginConfig as PluginConfig
    from caramba.config.topology import BranchingTopologyConfig as BranchingTopologyConfig
    from caramba.config.topology import CyclicTopologyConfig as CyclicTopologyConfig
    from caramba.config.topology import NestedTopologyConfig as NestedTopologyConfig
    from caramba.config.topology import ParallelTopologyConfig as ParallelTopologyConfig
    from caramba.config.topology import RecurrentTopologyConfig as RecurrentTopologyConfig
    from caramba.config.topology import ResidualTopologyConfig as ResidualTopologyConfig
    from caramba.config.topology import SequentialTopologyConfig as SequentialTopologyConfig
    from caramba.config.topology import StackedTopologyConfig as StackedTopologyConfig
    from caramba.config.topology import TopologyConfig as TopologyConfig
    from caramba.config.train import PhaseConfig as PhaseConfig
    from caramba.config.verify import ChoiceLogprobCase as ChoiceLogprobCase
    from caramba.config.verify import CompareVerifyConfig as CompareVerifyConfig
    from caramba.config.verify import EvalThresholds as EvalThresholds
    from caramba.config.verify import EvalVerifyConfig as EvalVerifyConfig
    from caramba.config.verify import FidelityVerifyConfig as FidelityVerifyConfig
    from caramba.config.verify import IntGreedyCase as IntGreedyCase
    from caramba.config.verify import KVCacheVerifyConfig as KVCacheVerifyConfig
    from caramba.config.verify import VerifyConfig as VerifyConfig

__getattr__ = lazy_exports(__name__, __file__)
