"""The only package that knows Lightning: one phase of training."""

from caramba.train.callbacks import BenchmarkArtifacts, BlockwiseDistillation, Verification
from caramba.train.data import workers_needed
from caramba.train.module import CarambaModule
from caramba.train.trainer import FitOutcome, PhaseData, fit, state_path

__all__ = [
    "BenchmarkArtifacts",
    "BlockwiseDistillation",
    "CarambaModule",
    "FitOutcome",
    "PhaseData",
    "Verification",
    "fit",
    "state_path",
    "workers_needed",
]
