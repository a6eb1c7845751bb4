"""The leaves of a manifest by key, read as plain JSON whatever its schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from caramba.runs.manifest import MANIFEST

MOST_TEXT = 300
"""Characters of one value of a manifest; longer ones are cut, and their hash is kept so that they still differ."""


def flatten(value: Any, path: str = "") -> Iterator[str]:
    """Yield `KEY<tab>JSON` for each leaf; items of a list are named by their `id` or `name` where they have one."""
    if isinstance(value, dict) and value:
        for key, item in cast("dict[str, Any]", value).items():
            yield from flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in cast("list[Any]", value)):
        for index, item in enumerate(cast("list[Any]", value)):
            named = cast("dict[str, Any]", item) if isinstance(item, dict) else {}
            name = named.get("id") or named.get("name") or index
            yield from flatten(item, f"{path}[{name}]")
    else:
        text = json.dumps(value)
        if len(text) > MOST_TEXT:
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            text = f"{text[:MOST_TEXT]}\u2026 ({len(text):,} characters, SHA-256 {digest})"
        yield f"{path}\t{text}".replace("\n", " ")


def read_leaves(run: Path) -> dict[str, str]:
    """Return the leaves of a run's manifest as JSON texts, none of a manifest that is not readable."""
    try:
        plain = json.loads((run / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    lines = flatten(plain) if isinstance(plain, dict) and plain else ()
    return {key: value for key, _, value in (line.partition("\t") for line in lines)}
