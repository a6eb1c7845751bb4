"""Bytes of tensors, counted from what is allocated."""

from __future__ import annotations

import itertools

from torch import nn

from caramba.model.identity import plain_tensors


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; a tied weight counts once, codes as they are stored."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in plain_tensors(itertools.chain(model.parameters(), model.buffers()))
    }
    return sum(storages.values())
