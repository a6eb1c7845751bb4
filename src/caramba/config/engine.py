"""How requests are batched while others run: slots, their length, and what waits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from caramba.config.base import Config
from caramba.config.generate import Compiled
from caramba.config.kvcache import CacheKind
from caramba.config.layer_base import Positive


class EngineConfig(Config):
    """An engine of `n_slots` requests at a time. Its cache is allocated once, (n_slots + n_ahead) * max_len tokens."""

    n_slots: Positive = Field(
        default=8, description="requests that decode together, one row of the cache each"
    )
    n_ahead: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="requests whose prompts run before a slot is free, each in one more row of the cache: no slot "
        "is idle for a prompt then; on CUDA, with captured steps, an exact cache and no prefix_cache_bytes",
    )
    max_len: Positive = Field(
        default=2048, description="most tokens of a request's prompt and new text together"
    )
    cache_kind: CacheKind | None = Field(
        default=None,
        description="format of the cache; unset, the one that the model was trained for (cache_format), else its dtype",
    )
    prefill_chunk: Positive = Field(
        default=512,
        description="prompt tokens per step, padding included, so that long prompts do not hold up the decoding rows; "
        "where steps are captured a prompt of up to 512 runs whole with an exact cache, if none of it was kept",
    )
    max_queue: Annotated[int, Field(ge=0)] = Field(
        default=256, description="requests that wait for a slot; one more is refused"
    )
    batch_timeout: Annotated[float, Field(ge=0, allow_inf_nan=False)] = Field(
        default=0.0,
        description="seconds that a started engine in which nothing runs waits for more requests to begin with, from "
        "the first on and until there are n_slots",
    )
    prefix_cache_bytes: Annotated[int, Field(ge=0)] = Field(
        default=0,
        description="memory for the keys and values of earlier texts, whose equal beginnings are not run again",
    )
    compiled: Compiled = Field(
        default="graph",
        description="as in GenerateConfig: run steps on the device by themselves where it can; stats say what ran",
    )
