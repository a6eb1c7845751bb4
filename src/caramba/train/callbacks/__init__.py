"""Callbacks that decide when; what they do is in objects that know no Lightning."""

from caramba.train.callbacks.blockwise import BlockwiseDistillation
from caramba.train.callbacks.checkpointing import Checkpointing, KeptWeights
from caramba.train.callbacks.model_changes import (
    Compilation,
    CompiledGradients,
    Float8Products,
    GradientAveraging,
    Lowering,
)
from caramba.train.callbacks.monitoring import Monitoring, Profiling
from caramba.train.callbacks.planning import RuntimePlanning
from caramba.train.callbacks.stage import BenchmarkArtifacts, Verification
from caramba.train.callbacks.stopping import HeldOutStopping, TimeLimit, stopping_callbacks

__all__ = [
    "BenchmarkArtifacts",
    "BlockwiseDistillation",
    "Checkpointing",
    "Compilation",
    "CompiledGradients",
    "Float8Products",
    "GradientAveraging",
    "HeldOutStopping",
    "KeptWeights",
    "Lowering",
    "Monitoring",
    "Profiling",
    "RuntimePlanning",
    "TimeLimit",
    "Verification",
    "stopping_callbacks",
]
