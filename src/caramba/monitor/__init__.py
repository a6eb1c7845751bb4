"""What a phase of training is watched by: speed, waiting for data, norms, memory and a profile. No Lightning."""

from caramba.monitor.loss import RunningLoss
from caramba.monitor.memory import PeakMemory
from caramba.monitor.meter import PhaseMeter, Work
from caramba.monitor.norms import StepNorms, norms_of_stages
from caramba.monitor.peak import device_peak
from caramba.monitor.profile import PhaseProfile

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
