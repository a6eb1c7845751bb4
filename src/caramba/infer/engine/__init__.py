"""Continuous batching: requests join and leave a batch of slots while the others decode."""

from caramba.config.generate import EngineConfig as EngineConfig
from caramba.errors import EngineClosed as EngineClosed
from caramba.errors import QueueFull as QueueFull
from caramba.infer.engine.batch import EngineStats as EngineStats
from caramba.infer.engine.engine import Engine as Engine
from caramba.infer.engine.request_handle import Event as Event
from caramba.infer.engine.request_handle import RequestHandle as RequestHandle
