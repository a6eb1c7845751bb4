"""The one reader of JSON files that others wrote: bounded in size and depth, with an error that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from caramba.errors import CarambaError

MAX_BYTES = 16 << 20  # parsed, the worst of texts takes some 20 times as much
MAX_DEPTH = 64


def read_object(
    file: Path, error: type[CarambaError], fix: str, *, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """Return the JSON object in a file.

    Args:
        error: type of the error.
        fix: what the user can do, the end of the error's text.

    Raises:
        CarambaError: of type `error`; the file is too large, is not UTF-8 or JSON, is nested deeper than `MAX_DEPTH`,
            or holds something other than an object.
    """
    try:
        size = file.stat().st_size
        if size > max_bytes:
            raise error(f"{file}: {size} bytes, expected at most {max_bytes}; {fix}")
        content = file.read_bytes()
    except OSError as found:
        raise error(f"{file}: cannot be read ({found.strerror}); {fix}") from found
    return parse_object(content, str(file), error, fix)


def parse_object(content: bytes | str, where: str, error: type[CarambaError], fix: str) -> dict[str, Any]:
    """Return the JSON object in a text.

    Raises:
        CarambaError: of type `error`; see `read_object`.
    """
    try:
        value: Any = json.loads(content.decode("utf-8") if isinstance(content, bytes) else content)
    except (ValueError, RecursionError) as reason:
        raise error(f"{where}: not readable as JSON ({str(reason)[:100]}); {fix}") from None
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, got {type(value).__name__}; {fix}")
    found: dict[str, Any] = cast("dict[str, Any]", value)
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item)]
        if not level:
            return found
    raise error(f"{where}: nested deeper than {MAX_DEPTH} levels; {fix}")


def _children(item: dict[str, Any] | list[Any]) -> list[Any]:
    values = item.values() if isinstance(item, dict) else item
    return [value for value in values if isinstance(value, dict | list)]
