"""Lightning's checkpoint files, written whole and read without pickled code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO

from caramba.data.checkpoint import load_training_state, save_training_state


class WholeCheckpointIO(CheckpointIO):
    """Saves through a temporary file, fsync and rename; loads with weights_only."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        save_training_state(Path(path), checkpoint)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_training_state(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)
