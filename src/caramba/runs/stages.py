"""The record of a run's finished stages, as far as opening its weights needs it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from caramba.errors import CheckpointError
from caramba.runs.files import check_tree

STAGES = "stages"


@dataclass(frozen=True)
class FinishedStage:
    """A stage that saved weights: its id, their role (teacher, student, control, variant) and file."""

    id: str
    role: str
    checkpoint: Path


def read_finished_stages(folder: Path) -> list[FinishedStage]:
    """Return the stages of a run, or of one of its groups, that saved weights, in order.

    Raises:
        CheckpointError: a record that is missing, cannot be read, differs from what was written, or names a file
            outside the run.
    """
    found: list[FinishedStage] = []
    check_tree(folder / STAGES)
    for file in sorted((folder / STAGES).glob("*.json"), key=_number):
        try:
            phase = json.loads(file.read_text(encoding="utf-8"))["phase"]
            checkpoint, stage, role = phase["checkpoint"], phase["id"], phase["trains"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                f"{file}: cannot be read as the record of a stage ({type(error).__name__}); restore it, or name a "
                "checkpoint file"
            ) from error
        if not checkpoint:
            continue
        path = Path(str(checkpoint))
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                f"{file}: names {str(path)[:200]!r}, expected a file inside the run; restore the record"
            )
        found.append(FinishedStage(str(stage), str(role), folder / path))
    return found


def _number(file: Path) -> tuple[int, str]:
    number = file.stem.split("-", 1)[0]
    return (int(number) if number.isdigit() else -1), file.name
