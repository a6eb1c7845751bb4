"""The words that may come next on a command line: commands, flags, runs, and keys with their values."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from caramba.config.base import Config
from caramba.config.composition import Composition, TrainGroup
from caramba.launch.commands.table import COMMANDS
from caramba.launch.overrides import FLAGS
from caramba.runs import list_runs

TAKES_OVERRIDES = ("launch", "compile", "run")
TAKES_RUNS = re.compile(r"(SWEEP|RUN(_A RUN_B)?)(?P<many>\.\.\.)?")
"""Usage of the commands whose first words are runs."""


def complete_word(before: list[str], typed: str) -> list[str] | None:
    """Return what may stand where `typed` is, after the words `before` it; None where Hydra has to be asked."""
    command = before[0] if before and before[0] in COMMANDS else ""
    if typed.startswith("-"):
        flags = FLAGS if command in ("", "launch") else tuple(COMMANDS[command].flags)
        return [flag for flag in flags if flag.startswith(typed)]
    if command and command not in TAKES_OVERRIDES:
        usage = TAKES_RUNS.match(COMMANDS[command].usage)
        has_run = any(not word.startswith("-") for word in before[1:])
        if usage is None or (has_run and not usage["many"]):
            return []
        # bash adds the names of files itself.
        names = ["latest", *(f"runs/{run.parent.name}/{run.name}" for run in list_runs())]
        return [name for name in names if name.startswith(typed)]
    if any("=" not in word and not word.startswith("-") for word in before[bool(command) :]):
        return []  # A word that is no override: Hydra would print an error.
    if "=" in typed:
        key, _, value = typed.partition("=")
        values = list(_values(key.lstrip("+~")))
        return [f"{key}={one}" for one in values if one.startswith(value)] if values else None
    commands = [name for name in COMMANDS if name.startswith(typed)] if not before else []
    if not typed and commands:
        return commands
    return [*commands, *_keys(typed)] if commands or "." in typed.strip(".") or typed.endswith(".") else None


def _keys(typed: str) -> list[str]:
    """Return the keys that begin with a text, one level deep: `train.steps=`, or `model.embedder.` of a section."""
    section, dot, start = typed.rpartition(".")
    schema = _schema_at(section) if dot else Composition
    if schema is None:
        return []
    found: list[str] = []
    for name, field in schema.model_fields.items():
        if name.startswith(start):
            has_more = _schema_of(name, field.annotation) is not None
            found.append(f"{section}{dot}{name}{'.' if has_more else '='}")
    return found


def _schema_at(path: str) -> type[Config] | None:
    schema: type[Config] | None = Composition
    for name in path.split("."):
        field = schema.model_fields.get(name) if schema is not None else None
        schema = _schema_of(name, field.annotation) if field is not None else None
    return schema


def _schema_of(name: str, annotation: Any) -> type[Config] | None:
    if name == "train":
        return TrainGroup
    return next((kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, Config)), None)


def _values(path: str) -> Iterator[str]:
    """Yield the values that a key may have, where there are few."""
    section, _, name = path.rpartition(".")
    schema = _schema_at(section) if section else None
    field = schema.model_fields.get(name) if schema is not None else None
    for kind in _kinds(field.annotation) if field is not None else ():
        if get_origin(kind) is Literal:
            yield from (str(value) for value in get_args(kind))
        elif kind is bool:
            yield from ("true", "false")


def _kinds(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Union, types.UnionType):
        for part in get_args(annotation):
            yield from _kinds(part)
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    else:
        yield annotation
