"""What a run reads from outside, by content: a resumed run goes on with the weights and the text that it began with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from caramba.config.model import ModelConfig
from caramba.errors import CheckpointError, DataError
from caramba.runs.files import write_json

SOURCES = "sources.json"
DATA = "data"
# Labels of models that were trained here from scratch: of the one that a run's teacher is, and of any other.
PROXY, ORIGIN = "proxy", "origin"
OF_FOLDERS = ("teacher_weights", "student_weights")


def starts_anew(model: ModelConfig, role: str | None) -> bool:
    """Return whether the weights of `role` come from no file."""
    if role == "teacher":
        return model.teacher is None or model.teacher.checkpoint is None
    return model.path is None and model.checkpoint is None


def labels_as(role: str, labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels of weights that are read as `role`: a teacher that another run trained from scratch is a proxy,
    as one that the run trains itself. Which folders the run that trained them read its own models from stays with it.
    """
    found = {key: label for key, label in labels.items() if not key.startswith(OF_FOLDERS)}
    if role == "teacher" and ORIGIN in found:
        found.setdefault(PROXY, found.pop(ORIGIN))
    return found


def hold_source(run_dir: Path, what: str, place: str, identity: str) -> None:
    """Note what a run reads under the name `what`, or hold it against the note once the run has begun.

    Phases before an interrupt and after it would otherwise learn from two teachers or texts, and the tables compare
    what was measured on either. Only the content counts: the same files may have moved.

    Args:
        what: `data`, or the role of a model, `teacher` or `student`.
        place: where it was found, for the message.
        identity: a hash of the content.

    Raises:
        CheckpointError, DataError: the run began with other weights or other data.
    """
    file = run_dir / SOURCES
    noted: dict[str, dict[str, str]] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    before = noted.get(what)
    if before is not None and before["identity"] != identity and _has_begun(run_dir):
        kind = "data" if what == DATA else f"{what}'s weights"
        error = DataError if what == DATA else CheckpointError
        raise error(
            f"{run_dir}: the {kind} in {place} have changed since this run began: SHA-256 {before['identity'][:12]} "
            f"(of {before['place']}), now {identity[:12]}; what is on record came from the former. Put them back and "
            "resume, or start a new run (resume=never)"
        )
    entry = {"place": place, "identity": identity}
    if before != entry:
        write_json(file, noted | {what: entry})


def _has_begun(run_dir: Path) -> bool:
    """Whether a stage is on record or a phase was planned: before that nothing came of what was read."""
    return (run_dir / "plan.json").is_file() or any((run_dir / "stages").glob("*.json"))
