"""Continuous batching: requests join and leave a batch of slots while the others decode."""

from caramba.config.generate import EngineConfig
from caramba.errors import EngineClosed, QueueFull
from caramba.infer.engine.engine import Engine
from caramba.infer.engine.request_handle import Event, FinishReason, RequestHandle
from caramba.infer.engine.stats import EngineStats

__all__ = [
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineStats",
    "Event",
    "FinishReason",
    "QueueFull",
    "RequestHandle",
]
