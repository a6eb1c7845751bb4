"""annotations.json: tags and a note that a person gave a run. It is no part of what the run computed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from caramba.errors import ConfigError
from caramba.runs.files import write_json

ANNOTATIONS = "annotations.json"


@dataclass(frozen=True)
class Annotations:
    """Tags in the order in which they were given, and a note."""

    tags: list[str] = field(default_factory=lambda: [])
    note: str = ""
    problems: list[str] = field(default_factory=lambda: [])


def read_annotations(run: Path) -> Annotations:
    """Return the annotations of a run; of a damaged file none, with what is wrong."""
    file = run / ANNOTATIONS
    try:
        plain: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Annotations()
    except (OSError, ValueError, RecursionError) as error:
        return Annotations(problems=[f"{ANNOTATIONS}: cannot be read: {error}"])
    content = cast("dict[str, Any]", plain) if isinstance(plain, dict) else {}
    tags, note = content.get("tags"), content.get("note")
    if not isinstance(tags, list) or not isinstance(note, str):
        return Annotations(problems=[f"{ANNOTATIONS}: expected tags (a list) and note (a text)"])
    return Annotations([str(tag) for tag in cast("list[Any]", tags)], note)


def read_for_change(run: Path) -> Annotations:
    """Return the annotations of a run.

    Raises:
        ConfigError: the file is damaged, so that a change would lose what it had.
    """
    found = read_annotations(run)
    if found.problems:
        raise ConfigError(f"{run}: {found.problems[0]}; repair {ANNOTATIONS}, or remove it")
    return found


def write_annotations(run: Path, annotations: Annotations) -> None:
    """Write the annotations of a run, whole."""
    plain = asdict(annotations)
    del plain["problems"]
    write_json(run / ANNOTATIONS, plain)
