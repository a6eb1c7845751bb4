"""Continuous batching: requests join and leave a batch of slots while the others go on."""

from caramba.config.engine import EngineConfig
from caramba.errors import EngineClosed, QueueFull
from caramba.infer.engine.engine import Engine
from caramba.infer.engine.stats import EngineStats
from caramba.infer.engine.ticket import Event, FinishReason, Ticket

__all__ = [
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Event",
    "FinishReason",
    "QueueFull",
    "Ticket",
]
