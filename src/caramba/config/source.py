"""Paths into a configuration as a user types them, and where the value at a path was written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

Path = tuple[str | int, ...]


class Source(Protocol):
    """Knows where values came from: files with lines, or the command line."""

    def place(self, path: Path) -> str:
        """Return "conf/model/tiny.yaml:14", "command line: train.steps=x", or an empty string."""
        ...


def show_path(path: Path) -> str:
    """Write a path as `model.topology.layers[0].type`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def read_path(text: str) -> Path:
    """The inverse of `show_path`."""
    parts = re.sub(r"\[(\d+)\]", r".\1", text).split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def placed(path: Path, source: Source | None) -> str:
    """Return " (conf/model/tiny.yaml:14)", or an empty string when the place is unknown."""
    where = source.place(path) if source is not None else ""
    return f" ({where})" if where else ""


def retrace(path: Path, origins: Mapping[Path, Path]) -> Path:
    """Turn a path of a lowered manifest into the path that the user typed, by the longest prefix that was moved."""
    for length in range(len(path), 0, -1):
        origin = origins.get(path[:length])
        if origin is not None:
            return (*origin, *path[length:])
    return path
