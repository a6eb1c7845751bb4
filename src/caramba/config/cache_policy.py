"""How a generation chooses its cache by measurement, and how attention runs at its length."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from caramba.config.base import Config, PathText
from caramba.config.kvcache import CacheKind, KVCacheKind
from caramba.config.layer_base import Positive

Q_CHUNK_BUCKETS = ((2048, None), (16384, 2048), (65536, 1024))
LONGEST_Q_CHUNK = 512
SMALLEST_STEP_CAPACITY = 512


class CacheKeys(Config):
    """Keys of a generation's cache and of its decode plan.

    `cache_kind=auto` takes the fastest format within `cache_budget_mb` that passes the quality gates on held-out
    text, each against the same model without a cache; where nothing can be measured or passes, a 16-bit format.
    """

    cache_kind: CacheKind | None = Field(
        default=None,
        description="format of the cache; unset, the one that the model was trained for (cache_format), else its dtype",
    )
    cache_budget_mb: PositiveFloat | None = Field(
        default=None, description="of cache_kind=auto: most megabytes (1e6 bytes) of the whole batch's cache"
    )
    cache_quality_max_delta_nll: NonNegativeFloat = Field(
        default=0.05, description="highest rise of the loss that passes, in nats per token"
    )
    cache_quality_max_ppl_ratio: NonNegativeFloat = Field(
        default=1.05, description="highest ratio of perplexities that passes"
    )
    cache_quality_max_mean_kl: NonNegativeFloat = Field(
        default=0.05, description="nats per token, of held-out text and of the needle's answers alike"
    )
    cache_quality_max_tokens: Annotated[int, Field(ge=256)] = Field(
        default=2048,
        description="of a window and of the needle's row, which are as long as the generation up to it; a longer one "
        "tells more of a long cache, in time that grows with its square",
    )
    cache_quality_text: str | None = Field(
        default=None,
        description="token folder, .npy, .tokens or UTF-8 text to measure on; unset: the run's held-out split",
    )
    cache_auto_benchmark: bool = Field(
        default=True,
        description="time decoding with every kind that passes; without it the smallest is taken",
    )
    cache_auto_bench_steps: Positive = Field(default=16, description="decode steps of one timing")
    cache_plan: Literal["reuse", "refresh"] = Field(
        default="reuse", description="refresh measures again what an earlier call has written down"
    )
    cache_plan_path: PathText | None = Field(
        default=None,
        description="file of the measurements; unset: one per model and machine in the cache folder",
    )
    cache_plan_probe: bool = Field(
        default=False,
        description="while generating compare with 16 bits, and continue with those if the KL is too high",
    )
    cache_plan_probe_interval_sec: NonNegativeFloat = Field(
        default=60.0, description="seconds between two probes of cache_plan_probe"
    )
    decode_plan: Literal["auto", "fixed", "none"] = Field(
        default="auto",
        description="auto: q_chunk by length, only where attention needs a mask; none: the model's own",
    )
    decode_q_chunk: Positive | None = Field(
        default=None,
        description="of decode_plan=fixed: queries that attend at a time; the result is the same",
    )
    decode_local_window: Positive | None = Field(
        default=None, description="attend to this many last tokens only: another result than the model's"
    )

    @model_validator(mode="after")
    def _keys_have_a_use(self) -> CacheKeys:
        if self.cache_kind is not KVCacheKind.AUTO:
            idle = [
                name
                for name, field in CacheKeys.model_fields.items()
                if name.startswith("cache_") and name != "cache_kind" and getattr(self, name) != field.default
            ]
            if idle:
                raise ValueError(
                    f"{idle[0]} is of cache_kind=auto, got cache_kind={self.cache_kind}; set it, or leave it out"
                )
        if (self.decode_q_chunk is not None) != (self.decode_plan == "fixed"):
            raise ValueError(
                f"decode_plan={self.decode_plan} and decode_q_chunk={self.decode_q_chunk}: "
                "fixed goes with a decode_q_chunk, and a decode_q_chunk with fixed"
            )
        return self


def q_chunk_for(n_tokens: int) -> int | None:
    """Return how many queries attend at a time at a length; None for all."""
    return next((chunk for limit, chunk in Q_CHUNK_BUCKETS if n_tokens <= limit), LONGEST_Q_CHUNK)


def step_capacity(n_tokens: int, limit: int | None) -> int:
    """Return the cache that steps on the device get for a length: 512 tokens doubled until it fits, at most `limit`.

    The doublings meet every bucket of the decode plan (2048, 16384, 65536), and no text pays for twice what it needs.
    """
    capacity = SMALLEST_STEP_CAPACITY
    while capacity < n_tokens:
        capacity *= 2
    return capacity if limit is None else max(n_tokens, min(capacity, limit))
