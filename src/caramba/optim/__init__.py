"""Optimisers and learning-rate schedules."""

from caramba.optim.adamw import build_optimizer
from caramba.optim.schedule import learning_rate

__all__ = ["build_optimizer", "learning_rate"]
