"""Measuring how a phase runs best on this machine: precision, batch size, checkpointing, compilation."""

from caramba.planning.batch import Ended, largest_batch
from caramba.planning.candidate import Budget, Candidate, Trial
from caramba.planning.decide import PlanningContext, decide
from caramba.planning.process import TrialProcess
from caramba.planning.trial import Stopwatch, disable_logging, run_trial

__all__ = [
    "Budget",
    "Candidate",
    "Ended",
    "PlanningContext",
    "Stopwatch",
    "Trial",
    "TrialProcess",
    "decide",
    "disable_logging",
    "largest_batch",
    "run_trial",
]
