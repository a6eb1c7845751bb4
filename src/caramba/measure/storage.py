"""Bytes of tensors, counted from what is allocated."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold the data: of one that stands for several, such as codes and scales, those."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from plain_tensors(getattr(tensor, name) for name in names)
        else:
            yield tensor


def model_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters and buffers; a tied weight counts once, codes as they are stored."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in plain_tensors(itertools.chain(model.parameters(), model.buffers()))
    }
    return sum(storages.values())
