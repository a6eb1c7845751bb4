"""What a phase of training is watched by: speed, waiting for data, norms, memory and a profile. No Lightning."""

from caramba.train.throughput.meter import PeakMemory as PeakMemory
from caramba.train.throughput.meter import PhaseMeter as PhaseMeter
from caramba.train.throughput.meter import RunningLoss as RunningLoss
from caramba.train.throughput.meter import StepNorms as StepNorms
from caramba.train.throughput.meter import Work as Work
from caramba.train.throughput.meter import device_peak as device_peak
from caramba.train.throughput.meter import norms_of_stages as norms_of_stages
from caramba.train.throughput.profile import PhaseProfile as PhaseProfile
