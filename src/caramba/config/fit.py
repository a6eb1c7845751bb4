"""Schema of auto-fit: the size that a preset is scaled to before an experiment is frozen."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from caramba.config.base import Config
from caramba.config.layer_base import Positive
from caramba.errors import quote

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt]?)", re.IGNORECASE)
_SCALES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_count(value: Any) -> Any:
    """Turn `150M`, `1.2B` or a whole float such as 1e8 into an int; pydantic checks other values itself.

    Raises:
        ValueError: a text that is no count.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    found = _COUNT.fullmatch(value.strip())
    if found is None:
        raise ValueError(f"expected a count such as 150M, 1.2B or 150000000, got {quote(value)}")
    return round(float(found[1]) * _SCALES[found[2].lower()])


class FitConfig(Config):
    """Scale the model to `target_params` parameters, embedder and head counted; `block_size` is its context.

    A launch resolves this section into concrete widths before it freezes the manifest.
    """

    target_params: Annotated[Positive, BeforeValidator(parse_count)] = Field(
        description="parameters of the scaled model, such as 150M, embedder and head included"
    )
    block_size: Positive | None = Field(
        default=None, description="context of the scaled model, in tokens; unset: the one of the training"
    )
