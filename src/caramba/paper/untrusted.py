"""Text of others, as UTF-8 can hold it: half a surrogate pair in a reply may not stop what saves the reply."""

from __future__ import annotations

import json
from typing import Any


def encodable(text: str) -> str:
    """Return the text with a question mark in place of what UTF-8 cannot hold."""
    return text.encode("utf-8", "replace").decode()


def read_json(text: str | bytes) -> Any:
    r"""Read JSON, whose escapes, such as \ud83d alone, can make text that UTF-8 cannot hold.

    Raises:
        ValueError: no JSON.
        RecursionError: nested too deeply.
    """
    return json.loads(encodable(json.dumps(json.loads(text), ensure_ascii=False)))
