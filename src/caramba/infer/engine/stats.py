"""What an engine has done so far and what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from caramba.infer.device_steps import DecodeForm


@dataclass
class EngineStats:
    """Counts since the engine was made; `active`, `ahead`, `queued` and the bytes are of this moment.

    Attributes:
        prefilled_tokens: prompt tokens that ran through the model; `prefix_tokens` did not have to.
        steps: draws for all decoding rows at once.
        prefix_hits: requests whose beginning was taken from an earlier one.
        cache_bytes: of all slots and rows ahead, allocated; `prefix_bytes` come besides.
        decode: how steps run, see `GenerateConfig.compiled`; `rows` one row after the other.
        not_compiled: why they run otherwise than asked, if so.
        active: requests in slots; `ahead` those in rows ahead of them, of which there are `n_ahead`.
        not_ahead: why there are none of these, if some were asked for.
        memory: use of memory slots in a text that has ended, see `Model.get_memory_stats`; NaN before the first such
            text, None for a model without slots.
    """

    n_slots: int = 0
    n_ahead: int = 0
    active: int = 0
    ahead: int = 0
    queued: int = 0
    submitted: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prefilled_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    prefix_bytes: int = 0
    cache_bytes: int = 0
    cache_kind: str = ""
    decode: DecodeForm | str = "eager"
    not_compiled: str | None = None
    not_ahead: str | None = None
    memory: dict[str, float] | None = None
