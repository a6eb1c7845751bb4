"""The identity of a model: what it computes, as one hash."""

from __future__ import annotations

import hashlib

import torch

from caramba.model.model import Model


def model_hash(model: Model) -> str:
    """Return a SHA-256 of what a model computes, whatever device it is on.

    It covers the description, for equal weights under another rotary base are another model, and the weights by name,
    shape and bytes.
    """
    spec = model.spec
    digest = hashlib.sha256(f"{spec.embedder!r} {spec.topology!r} {spec.head!r}".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
