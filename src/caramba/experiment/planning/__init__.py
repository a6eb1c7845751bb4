"""Measuring how a phase runs best on this machine: precision, batch size, checkpointing, compilation."""

from caramba.experiment.planning.batch import Ended, largest_batch
from caramba.experiment.planning.candidate import LEAST_SECONDS, SHARE, Budget, StepCandidate, Trial
from caramba.experiment.planning.decide import PlanningContext, decide
from caramba.experiment.planning.process import TrialProcess
from caramba.experiment.planning.trial import Stopwatch, disable_logging, run_trial

__all__ = [
    "LEAST_SECONDS",
    "SHARE",
    "Budget",
    "Ended",
    "PlanningContext",
    "StepCandidate",
    "Stopwatch",
    "Trial",
    "TrialProcess",
    "decide",
    "disable_logging",
    "largest_batch",
    "run_trial",
]
