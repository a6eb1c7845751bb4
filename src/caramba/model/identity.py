"""What a model is: the tensors that hold its data, their bytes, and one hash of what it computes."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from caramba.model.model import Model


def plain_tensors(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold the data: of one that contains several, such as codes and scales, those."""
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


def model_hash(model: Model) -> str:
    """Return a SHA-256 of what a model computes, whatever device it is on.

    It covers the description, for equal weights under another rotary base are another model, and the weights by name,
    class, shape and bytes; of quantised ones, those of codes and scales.
    """
    spec = model.spec
    digest = hashlib.sha256(f"{spec.embedder!r} {spec.topology!r} {spec.head!r}".encode())
    kept = model.state_dict(keep_vars=True)
    for name, whole in kept.items():
        parts = list(plain_tensors([whole]))
        if is_traceable_wrapper_subclass(whole):
            digest.update(type(whole).__name__.encode())
        for tensor in parts:
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
