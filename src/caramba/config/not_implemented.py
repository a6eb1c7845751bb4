"""Settings of the schema that are not implemented: refused before a run, noted by a plan, never ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from caramba.config.base import Later
from caramba.config.benchmark import PendingBenchmarkConfig
from caramba.config.manifest import Manifest
from caramba.config.narrowing import is_sequence, list_of
from caramba.config.source import Path, Source, format_place, retrace, show_path
from caramba.errors import ConfigError


@dataclass(frozen=True)
class NotImplementedKey:
    """A setting that is not implemented: its path, its value, and the work that will implement it."""

    path: Path
    value: Any
    comes_with: str

    def __str__(self) -> str:
        return f"{show_path(self.path)}={_text(self.value)} is not built yet: it comes with {self.comes_with}"


def find_unbuilt(value: Any, path: Path = ()) -> Iterator[NotImplementedKey]:
    """Walk a schema object and yield every setting marked `Later` that is in use."""
    if is_sequence(value):
        for index, item in enumerate(value):
            yield from find_unbuilt(item, (*path, index))
    if not isinstance(value, BaseModel):
        return
    if isinstance(value, PendingBenchmarkConfig):
        yield NotImplementedKey((*path, "type"), value.type, "the benchmark work")
    for name, field in type(value).model_fields.items():
        item = getattr(value, name)
        for mark in field.metadata:
            if isinstance(mark, Later) and _refused(mark, item, field.get_default(call_default_factory=True)):
                yield NotImplementedKey((*path, name), item, mark.comes_with)
        yield from find_unbuilt(item, (*path, name))


def refuse_unbuilt(
    manifest: Manifest, *, source: Source | None = None, origins: Mapping[Path, Path] | None = None
) -> None:
    """Raise when a manifest asks for behaviour that does not exist yet.

    Raises:
        ConfigError: naming each setting, its value, and the work it comes with.
    """
    lines: list[str] = []
    for item in find_unbuilt(manifest):
        path = retrace(item.path, origins or {})
        where = format_place(path, source)
        line = f"{NotImplementedKey(path, item.value, item.comes_with)}; remove it or choose another value{where}"
        if line not in lines:
            lines.append(line)
    if lines:
        raise ConfigError(
            lines[0] if len(lines) == 1 else f"{len(lines)} settings:\n  " + "\n  ".join(lines[:10])
        )


def _refused(mark: Later, value: Any, default: Any) -> bool:
    if not mark.values:
        return default is PydanticUndefined or value != default
    items: list[Any] = list_of(value) if is_sequence(value) else [value]
    return any(type(item) is type(refused) and item == refused for item in items for refused in mark.values)


def _text(value: Any) -> str:
    if is_sequence(value):
        return "[" + ", ".join(_text(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "{…}" if isinstance(value, BaseModel | dict) else str(value)
