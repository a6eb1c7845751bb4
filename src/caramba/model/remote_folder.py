"""Models of folders that `caramba export` wrote with their own modelling code, read back without running that code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from caramba.config.hf import spec_of_folder
from caramba.data.checkpoint import index_tensors, stream_into, weight_files
from caramba.errors import CheckpointError
from caramba.model.model import Model, build_empty

if TYPE_CHECKING:
    from caramba.data.checkpoint.shards import StoredTensor

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
    computed = {PREFIX + name: item for name, item in model.named_buffers()}
    stored: dict[str, StoredTensor] = {}
    for name, item in index_tensors(weight_files(folder)).items():
        if name in kept.values() or name not in computed:
            stored[name] = item  # unknown names are refused by stream_into
        elif not _is_computed(item, name, computed[name]):
            raise CheckpointError(
                f"{item.file}: {name} differs from what the network computes, expected equal values; export it again"
            )
    stream_into(model, stored, where=f"{where}={folder}", names=kept)
    return model.eval()


def _is_computed(stored: StoredTensor, name: str, computed: torch.Tensor) -> bool:
    """Whether a stored tensor has the values that the network computes, up to rounding on another device."""
    from safetensors import safe_open

    if stored.shape != computed.shape:
        return False
    with safe_open(stored.file, framework="pt") as file:
        found = file.get_tensor(name)
    expected = computed.cpu().to(found.dtype)
    if not found.is_floating_point():
        return torch.equal(found, expected)
    tolerance = 4 * torch.finfo(found.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)
