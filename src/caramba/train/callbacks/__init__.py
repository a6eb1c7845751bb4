"""Callbacks that decide when; what they do is in objects that know no Lightning."""

from caramba.train.callbacks.averaging import GradientAveraging
from caramba.train.callbacks.blockwise import BlockwiseDistillation
from caramba.train.callbacks.checkpointing import Checkpointing
from caramba.train.callbacks.compiling import Compilation
from caramba.train.callbacks.float8 import Float8Products
from caramba.train.callbacks.gradients import CompiledGradients
from caramba.train.callbacks.kept_weights import KeptWeights
from caramba.train.callbacks.lowering import Lowering
from caramba.train.callbacks.monitoring import Monitoring
from caramba.train.callbacks.planning import RuntimePlanning
from caramba.train.callbacks.profiling import Profiling
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
