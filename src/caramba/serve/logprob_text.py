"""Writes the log-probabilities of an answer as JSON, piece by piece while its tokens come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import to_json

NONE = b'"logprobs":null'
"""No text of an answer holds it: JSON escapes every quotation mark inside a string."""


class LogprobText:
    """The `logprobs` of an answer. It keeps text, not objects: 4,000 tokens with 20 alternatives are 80,000 objects,
    and to write them in one call, or to collect garbage among them, would stop the other requests of the process."""

    def __init__(self) -> None:
        self._items: dict[str, list[bytes] | None] = {}

    def add(self, logprobs: BaseModel) -> None:
        """Append the lists of one piece; a field that is null stays so."""
        values: Mapping[str, Any] = {name: getattr(logprobs, name) for name in type(logprobs).model_fields}
        for name, value in values.items():
            written = self._items.setdefault(name, None if value is None else [])
            if value and written is not None:
                written.append(to_json(value, inf_nan_mode="null")[1:-1])

    def put_into(self, answer: BaseModel) -> bytes:
        """Return the JSON of an answer of one choice without log-probabilities, with these in their place."""
        text = answer.model_dump_json().encode()
        if not self._items:
            return text
        fields = (
            to_json(name) + b":" + (b"null" if written is None else b"[" + b",".join(written) + b"]")
            for name, written in self._items.items()
        )
        head, _, tail = text.partition(NONE)
        return head + b'"logprobs":{' + b",".join(fields) + b"}" + tail
