"""Measuring how a phase runs best on this machine: precision, batch size, checkpointing, compilation."""

from caramba.planning.batch import Ended, largest_batch
from caramba.planning.candidate import Budget, Candidate, Trial
from caramba.planning.decide import Ground, decide
from caramba.planning.process import TrialProcess
from caramba.planning.trial import Stopwatch, run_trial, unrecorded

__all__ = [
    "Budget",
    "Candidate",
    "Ended",
    "Ground",
    "Stopwatch",
    "Trial",
    "TrialProcess",
    "decide",
    "largest_batch",
    "run_trial",
    "unrecorded",
]
