"""Optimisers, learning-rate schedules and averages of weights."""

from caramba.optim.average import WeightAverage
from caramba.optim.build import build_optimizer
from caramba.optim.clip import clip_gradients
from caramba.optim.lion import Lion
from caramba.optim.schedule import learning_rate

__all__ = ["Lion", "WeightAverage", "build_optimizer", "clip_gradients", "learning_rate"]
