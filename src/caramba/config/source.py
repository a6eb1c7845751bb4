"""Plain data of YAML and JSON: reading it within bounds, its mappings and lists, paths into it, where it stood."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard, cast

from caramba.errors import CarambaError, clip, hide_secrets, visible

MAX_BYTES = 16 << 20  # parsed, the worst of texts takes some 20 times as much
MAX_DEPTH = 64


def read_object(
    file: pathlib.Path, error: type[CarambaError], fix: str, *, max_bytes: int = MAX_BYTES
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


Path = tuple[str | int, ...]


class SourceMap(Protocol):
    """Knows where values came from: files with lines, or the command line."""

    def place(self, path: Path) -> str:
        """Return "conf/model/tiny.yaml:14", "command line: train.steps=x", or an empty string."""
        ...


LONGEST_PATH, LONGEST_KEY = 300, 60
"""Characters of a path, and of one of its keys, in a message."""


def show_path(path: Path) -> str:
    """Write a path as `model.topology.layers[0].type`, on one line; long keys and paths in part."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{_key(part)}" if text else _key(part)
    return text if len(text) <= LONGEST_PATH else f"{text[:200]}…{text[-80:]}"


def _key(part: object) -> str:
    key = hide_secrets(clip(str(part), LONGEST_KEY))
    return visible(key).replace("\n", "\\n").replace("\t", "\\t")


def read_path(text: str) -> Path:
    """The inverse of `show_path`, of a path that it writes whole."""
    parts = re.sub(r"\[(\d{1,9})\]", r".\1", text).split(".")
    return tuple(int(part) if is_index(part) else part for part in parts)


def is_index(part: str) -> bool:
    """Whether a part of a path is the place of a list's item."""
    return len(part) < 10 and part.isascii() and part.isdigit()


def format_place(path: Path, source: SourceMap | None) -> str:
    """Return " (conf/model/tiny.yaml:14)", or an empty string when the place is unknown."""
    where = source.place(path) if source is not None else ""
    return f" ({where})" if where else ""


def retrace(path: Path, origins: Mapping[Path, Path]) -> Path:
    """Map a path of a lowered manifest to the path that the user typed, by its longest moved prefix."""
    for length in range(len(path), 0, -1):
        origin = origins.get(path[:length])
        if origin is not None:
            return (*origin, *path[length:])
    return path


def is_mapping(value: Any) -> TypeGuard[dict[Any, Any]]:
    """Whether `value` is a dict."""
    return isinstance(value, dict)


def is_sequence(value: Any) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether `value` is a list or a tuple."""
    return isinstance(value, list | tuple)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether `value` is a list."""
    return isinstance(value, list)


def mapping_of(value: Any) -> dict[str, Any]:
    """Return `value` when it is a mapping, else an empty one: schema errors are for the schema to report."""
    return value if is_mapping(value) else {}


def list_of(value: Any) -> list[Any]:
    """Return `value` as a list when it is one or a tuple, else an empty list."""
    return list(value) if is_sequence(value) else []
