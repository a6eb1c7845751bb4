"""Optimisers, clipping, learning-rate schedules and averages of weights."""

from caramba.optim.adagc import AdaGC
from caramba.optim.adamw import AdamW
from caramba.optim.average import WeightAverage
from caramba.optim.build import build_optimizer, learning_rate
from caramba.optim.clip import NONFINITE, NonFiniteWatch, clip_gradients, clip_values, clipping_step
from caramba.optim.groups import local
from caramba.optim.lion import Lion
from caramba.optim.master_weights import MasterWeights
from caramba.optim.muon import MuonAdamW

__all__ = [
    "NONFINITE",
    "AdaGC",
    "AdamW",
    "Lion",
    "MasterWeights",
    "MuonAdamW",
    "NonFiniteWatch",
    "WeightAverage",
    "build_optimizer",
    "clip_gradients",
    "clip_values",
    "clipping_step",
    "learning_rate",
    "local",
]
