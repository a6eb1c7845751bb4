"""Where the weights of a run come from: from a file, or from a training of its own, and what that is called."""

from __future__ import annotations

from collections.abc import Mapping

from caramba.config.model import ModelConfig

# Labels of models that were trained here from scratch: of the one that a run's teacher is, and of any other.
PROXY, ORIGIN = "proxy", "origin"
OF_FOLDERS = ("teacher_weights", "student_weights")


def is_fresh_init(model: ModelConfig, role: str | None) -> bool:
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
