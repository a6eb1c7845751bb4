"""Readers and writers of checkpoints: safetensors for weights, weights-only torch files for training state."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from caramba.data.checkpoint.folder import fingerprint, signature, weight_files
    from caramba.data.checkpoint.header import read_metadata
    from caramba.data.checkpoint.shards import index_tensors, is_same_tensor, stream_into
    from caramba.data.checkpoint.tensors import (
        load_into,
        load_tensors,
        save_tensors,
        without_aliases,
    )
    from caramba.data.checkpoint.training_state import load_training_state, save_training_state

_HOMES = {
    "load_into": "tensors",
    "load_tensors": "tensors",
    "read_metadata": "header",
    "save_tensors": "tensors",
    "is_same_tensor": "shards",
    "index_tensors": "shards",
    "stream_into": "shards",
    "fingerprint": "folder",
    "signature": "folder",
    "weight_files": "folder",
    "without_aliases": "tensors",
    "load_training_state": "training_state",
    "save_training_state": "training_state",
}

__all__ = [
    "fingerprint",
    "index_tensors",
    "is_same_tensor",
    "load_into",
    "load_tensors",
    "load_training_state",
    "read_metadata",
    "save_tensors",
    "save_training_state",
    "signature",
    "stream_into",
    "weight_files",
    "without_aliases",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
