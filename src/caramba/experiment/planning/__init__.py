"""Measuring how a phase runs best on this machine: precision, batch size, checkpointing, compilation."""

from caramba.experiment.planning.batch import Ended as Ended
from caramba.experiment.planning.batch import largest_batch as largest_batch
from caramba.experiment.planning.candidate import LEAST_SECONDS as LEAST_SECONDS
from caramba.experiment.planning.candidate import SHARE as SHARE
from caramba.experiment.planning.candidate import Budget as Budget
from caramba.experiment.planning.candidate import StepCandidate as StepCandidate
from caramba.experiment.planning.candidate import Trial as Trial
from caramba.experiment.planning.decide import PlanningContext as PlanningContext
from caramba.experiment.planning.decide import decide as decide
from caramba.experiment.planning.process import TrialProcess as TrialProcess
from caramba.experiment.planning.trial import Stopwatch as Stopwatch
from caramba.experiment.planning.trial import disable_logging as disable_logging
from caramba.experiment.planning.trial import run_trial as run_trial
