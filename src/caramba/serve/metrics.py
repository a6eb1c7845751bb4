"""What Prometheus reads at /metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from caramba.infer.engine import EngineStats
from caramba.model.memory import STATISTICS

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Metrics:
    """Counters of one server. Times are taken where tokens leave the engine for the client."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.open_connections: Callable[[], int] = int  # a running server sets this
        self.refused_connections = Counter(
            "caramba_refused_connections", "Connections above the bound", registry=self.registry
        )
        self.requests = Counter("caramba_requests", "Answers sent", ("path", "status"), registry=self.registry)
        self.prompt_tokens = Counter("caramba_prompt_tokens", "Tokens of accepted prompts", registry=self.registry)
        self.new_tokens = Counter("caramba_generated_tokens", "Tokens generated", registry=self.registry)
        self.finished = Counter(
            "caramba_finished", "Requests that left the engine", ("reason",), registry=self.registry
        )
        self.first_token = Histogram(
            "caramba_time_to_first_token_seconds",
            "From a request's acceptance to its first token",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.between_tokens = Histogram(
            "caramba_inter_token_latency_seconds",
            "From one token of a request to its next",
            buckets=SECONDS,
            registry=self.registry,
        )
        for name, text, read in (
            ("active_slots", "Slots that hold a request", lambda: stats().active),
            ("requests_ahead", "Requests whose prompts run before a slot is free", lambda: stats().ahead),
            ("queue_depth", "Requests that wait for a slot", lambda: stats().queued),
            ("cache_bytes", "Bytes of the key/value caches", lambda: stats().cache_bytes),
            ("prefix_hits", "Prompts whose beginning was in the prefix cache", lambda: stats().prefix_hits),
            ("prefix_tokens", "Prompt tokens that did not run again", lambda: stats().prefix_tokens),
            ("prefix_bytes", "Bytes of the prefix cache", lambda: stats().prefix_bytes),
            ("slots", "Slots", lambda: stats().n_slots),
            ("open_connections", "Open connections", lambda: self.open_connections()),
        ):
            Gauge(f"caramba_{name}", text, registry=self.registry).set_function(read)
        for key, text in STATISTICS.items() if stats().memory is not None else ():
            gauge = Gauge(f"caramba_memory_{key.removeprefix('memory_')}", text, registry=self.registry)
            gauge.set_function(lambda key=key: (stats().memory or {})[key])

    def text(self) -> bytes:
        """Return all of it as Prometheus text."""
        return generate_latest(self.registry)
