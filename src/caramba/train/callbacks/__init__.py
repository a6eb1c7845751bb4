"""Callbacks that decide when; what they do is in objects that know no Lightning."""

from caramba.train.callbacks.checkpointing import Checkpointing as Checkpointing
from caramba.train.callbacks.checkpointing import KeptWeights as KeptWeights
from caramba.train.callbacks.model_changes import Compilation as Compilation
from caramba.train.callbacks.model_changes import CompiledGradients as CompiledGradients
from caramba.train.callbacks.model_changes import Float8Products as Float8Products
from caramba.train.callbacks.model_changes import GradientAveraging as GradientAveraging
from caramba.train.callbacks.model_changes import Lowering as Lowering
from caramba.train.callbacks.monitoring import Monitoring as Monitoring
from caramba.train.callbacks.monitoring import Profiling as Profiling
from caramba.train.callbacks.planning import RuntimePlanning as RuntimePlanning
from caramba.train.callbacks.stage import BenchmarkArtifacts as BenchmarkArtifacts
from caramba.train.callbacks.stage import Verification as Verification
from caramba.train.callbacks.stopping import BlockwiseDistillation as BlockwiseDistillation
from caramba.train.callbacks.stopping import HeldOutStopping as HeldOutStopping
from caramba.train.callbacks.stopping import TimeLimit as TimeLimit
from caramba.train.callbacks.stopping import stopping_callbacks as stopping_callbacks
