"""What no strategy that keeps a part of the model on every rank can train, by stages or by shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from caramba.config.train import PhaseConfig

_OFF: dict[str, Any] = {
    "lora": None,
    "ema_decay": None,
    "optimizer_offload": False,
    "activation_offload": False,
    "float8": "none",
}


def whole_model_keys(phase: PhaseConfig, **more: Any) -> list[str]:
    """Return the keys of a phase that need the whole model on a rank. `more` adds keys with their off values."""
    return [key for key, off in {**_OFF, **more}.items() if getattr(phase, key) != off]


def float16_conflict(phase: PhaseConfig, name: str) -> Iterator[str]:
    """Yield why a phase in float16 cannot have the strategy `name`, if it is one."""
    if phase.dtype == "float16" or phase.amp_dtype == "float16":
        yield f"float16 scales its loss, which {name} does not; use bfloat16, or parallel=ddp"
