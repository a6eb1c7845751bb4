"""What a phase of training is watched by: speed, waiting for data, norms, memory and a profile. No Lightning."""

from caramba.train.throughput.loss import RunningLoss
from caramba.train.throughput.memory import PeakMemory
from caramba.train.throughput.meter import PhaseMeter, Work, device_peak
from caramba.train.throughput.norms import StepNorms, norms_of_stages
from caramba.train.throughput.profile import PhaseProfile

__all__ = [
    "PeakMemory",
    "PhaseMeter",
    "PhaseProfile",
    "RunningLoss",
    "StepNorms",
    "Work",
    "device_peak",
    "norms_of_stages",
]
