"""The base of every schema class: strict, frozen, closed, with aliases, nearest names and `Later` marks."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

EXECUTABLE_KEYS = frozenset({"_target_", "_partial_", "_args_", "_recursive_", "_convert_", "_call_"})


class Later:
    """Marks a schema field, or some of its values, whose behaviour is not built yet.

    Used as `Annotated[T, Later("what brings it", values...)]`. Without values every setting other than the
    field's default is refused; with values only those are. `caramba.config.later.refuse_unbuilt` walks a manifest
    before it runs, so nothing that is accepted by the schema is ever ignored in silence.
    """

    def __init__(self, comes_with: str, *values: Any) -> None:
        self.comes_with = comes_with
        self.values = values


def nearest(name: str, options: Any) -> str:
    """Return "; did you mean 'x'?" for the option closest to `name`, or an empty string."""
    near = difflib.get_close_matches(str(name), [str(option) for option in options], n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


def refuse_executable(value: Any, path: tuple[Any, ...] = ()) -> None:
    """Raise when a mapping at any depth names code to run (`_target_` and its kin): manifests are data."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key in EXECUTABLE_KEYS:
                raise PydanticCustomError(
                    "executable_key",
                    "{key} would run code, and a manifest only names things; use `type:` with a known class",
                    {"key": str(key), "path": list(path)},
                )
            refuse_executable(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            refuse_executable(item, (*path, index))


class Config(BaseModel):
    """A frozen node of a manifest. Unknown keys are errors that carry the nearest known name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())

    aliases: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _normalise(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        out: dict[str, Any] = {}
        for key, item in value.items():
            name = cls.aliases.get(key, key)
            if name in EXECUTABLE_KEYS:
                refuse_executable({name: item})
            if name not in cls.model_fields:
                raise PydanticCustomError(
                    "unknown_key",
                    "unknown key{hint} Known keys: {known}",
                    {
                        "key": str(key),
                        "hint": nearest(str(key), [*cls.model_fields, *cls.aliases]) or ".",
                        "known": ", ".join(cls.model_fields),
                    },
                )
            if name in out:
                raise PydanticCustomError(
                    "alias_clash", "{key} is another name of {name}, and both are set; keep one", {"key": key, "name": name}
                )
            out[name] = tuple(item) if isinstance(item, list) else item
        return out
