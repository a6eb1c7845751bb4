"""Plain data of YAML and JSON: its mappings and lists, paths into it, and where a value was written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol, TypeGuard

from caramba.errors import clip, hide_secrets, visible

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
