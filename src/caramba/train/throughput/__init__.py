"""What a phase of training is watched by: speed, waiting for data, norms, memory and a profile. No Lightning."""

from caramba.train.throughput.meter import (
    PeakMemory,
    PhaseMeter,
    RunningLoss,
    StepNorms,
    Work,
    device_peak,
    norms_of_stages,
)
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
