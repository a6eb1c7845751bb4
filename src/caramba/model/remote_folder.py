"""Models of folders that `caramba export` wrote with their own modelling code, read back without running that code."""

from __future__ import annotations

from pathlib import Path

import torch

from caramba.checkpoint import stored_tensors, stream_into, weight_files
from caramba.config.hf import spec_of_folder
from caramba.model.build import build_empty
from caramba.model.model import Model

PREFIX = "model."  # of every tensor: the exported class holds the network under this name


def load_remote_folder(folder: Path, *, device: torch.device | str = "cpu", where: str = "RUN") -> Model:
    """Build the network that config.json describes and read the weights into it, as float32; return it in eval mode.

    Raises:
        CheckpointError: the folder is incomplete, damaged, or was written before exports described themselves.
    """
    spec = spec_of_folder(folder)
    model = build_empty(spec, device)
    kept = {name: PREFIX + name for name in model.state_dict()}
    # The folder also holds what a network computes when it is built, which transformers would otherwise leave empty.
    stored = {
        name: item for name, item in stored_tensors(weight_files(folder)).items() if name in kept.values()
    }
    stream_into(model, stored, where=f"{where}={folder}", names=kept)
    return model.eval()
