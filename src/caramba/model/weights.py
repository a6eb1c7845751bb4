"""The identity of a model's weights."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 of a model's weights by name, shape and bytes, whatever device they are on."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
