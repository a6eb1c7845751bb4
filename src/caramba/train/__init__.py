"""The only package that knows Lightning: one phase of training."""

from caramba.train.callbacks import BenchmarkArtifacts, BlockwiseDistillation, Verification
from caramba.train.data import workers_needed
from caramba.train.module import CarambaModule
from caramba.train.strategies import SHARDED, STAGED, strategy_for
from caramba.train.trainer import FitOutcome, PhaseData, drop_state, fit, has_saved_state, state_path

__all__ = [
    "SHARDED",
    "STAGED",
    "BenchmarkArtifacts",
    "BlockwiseDistillation",
    "CarambaModule",
    "FitOutcome",
    "PhaseData",
    "Verification",
    "drop_state",
    "fit",
    "has_saved_state",
    "state_path",
    "strategy_for",
    "workers_needed",
]
