"""Safetensors files: written whole, checked before they are read, never unpickled."""

import json
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from caramba.data.checkpoint.header import read_header
from caramba.errors import CheckpointError
from caramba.runs.files import whole_file


def without_aliases(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Drop names that are the same tensor as another (tied weights), keeping the first in sorted order.

    Args:
        state: a state dict, of parameters or of detached tensors.

    Returns:
        (tensors, aliases): `tensors` in the order of `state`; `aliases` maps each dropped name to the kept one.
    """
    kept: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name in sorted(state):
        first = kept.setdefault(_identity(state[name]), name)
        if first != name:
            aliases[name] = first
    return {name: tensor for name, tensor in state.items() if name not in aliases}, aliases


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors, on any device, to a safetensors file: the old file or the new one is there, never a part.

    Raises:
        CheckpointError: two names share memory (see `without_aliases`), a tensor has no data (meta device), or
            metadata is not text.
        OSError: the disk is full or the folder cannot be written; the old file is as it was.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    _check_savable(path, tensors, metadata or {})
    # A view is written as itself: contiguous() of a contiguous slice still shares its parent's storage.
    plain = {name: _own_memory(tensor.detach()) for name, tensor in tensors.items()}
    with whole_file(path) as temporary:
        try:
            save_file(plain, temporary, metadata=dict(metadata) if metadata else None)
            _sort_metadata(temporary)
        except SafetensorError as error:
            size = sum(tensor.nbytes for tensor in plain.values())
            raise OSError(f"{path}: could not write {size} bytes of tensors: {error}") from error


def load_tensors(path: Path, device: str | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Read every tensor of a safetensors file onto `device`.

    Raises:
        CheckpointError: the file is missing, truncated, corrupt, or a pickle.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    read_header(path)
    try:
        return load_file(path, device=str(device))
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file of {path.stat().st_size} bytes: {error}"
        ) from error


def load_into(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Copy `tensors` into the parameters and buffers of `module`, all or none.

    A tied weight may be given under any of its names. Floating types are converted to the module's.

    Args:
        module: on real memory, not meta.
        tensors: names as in `module.state_dict()`.
        where: what the tensors came from, for the message.

    Raises:
        CheckpointError: names each tensor that is missing, unexpected, or of another shape or kind.
    """
    own = {k: v for k, v in module.state_dict(keep_vars=True).items() if isinstance(v, torch.Tensor)}
    _, aliases = without_aliases(own)
    given = {aliases.get(name, name) for name in tensors}
    problems = [
        f"missing {name} {describe(tensor)}" for name, tensor in own.items() if aliases.get(name, name) not in given
    ]
    for name, tensor in tensors.items():
        target = own.get(name)
        if target is None:
            problems.append(f"unexpected {name} {describe(tensor)}")
        elif target.shape != tensor.shape or kind_of(target) != kind_of(tensor):
            problems.append(f"{name}: expected {describe(target)}, found {describe(tensor)}")
        elif target.is_meta:
            problems.append(f"{name}: the module is on meta, without memory; call to_empty() first")
    if problems:
        raise CheckpointError(
            f"{where}: does not fit {type(module).__name__}, {len(problems)} of {len(own)} tensors differ:\n  "
            + "\n  ".join(problems)
            + "\n  use the manifest that the checkpoint was trained with, or another checkpoint"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


# --- checks


def _check_savable(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise CheckpointError(
                f"{path}: metadata {key!r} is {type(value).__name__}, expected text; use json.dumps(value)"
            )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"{path}: {name} is {type(tensor).__name__}, expected a tensor")
        if tensor.is_meta:
            raise CheckpointError(f"{path}: {name} is on the meta device and has no data to save")
        if tensor.layout is not torch.strided:
            raise CheckpointError(f"{path}: {name} has layout {tensor.layout}; call to_dense() first")
    spans: dict[Any, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            storage = tensor.untyped_storage()
            first = tensor.storage_offset() * tensor.element_size()
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            span = (first, first + (last + 1) * tensor.element_size(), name)
            spans.setdefault((tensor.device, storage.data_ptr()), []).append(span)
    for shared in spans.values():
        shared.sort()
        for (_, end, name), (start, _, other) in pairwise(shared):
            if start < end:
                raise CheckpointError(
                    f"{path}: {name} and {other} share memory; drop tied weights with"
                    " without_aliases(state_dict), or clone() one of them"
                )


def _sort_metadata(path: Path) -> None:
    """Sort the metadata of a header in place: the library writes its keys in another order in each process."""
    with open(path, "rb+") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        if "__metadata__" not in header:
            return
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        if len(text) > length:
            raise RuntimeError(f"{path}: the sorted header has {len(text)} bytes, expected at most {length}")
        file.seek(8)
        file.write(text.ljust(length))


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.clone(memory_format=torch.contiguous_format)


def _identity(tensor: torch.Tensor) -> Any:
    """Equal for the same elements of the same memory; memory-less tensors (meta, empty) are only themselves."""
    if tensor.is_meta or tensor.numel() == 0:
        return id(tensor)
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (tensor.device, *place, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def kind_of(tensor: torch.Tensor) -> str:
    """Return what a tensor's dtype can be converted within: floating, complex, or the dtype itself."""
    if tensor.is_floating_point():
        return "floating"
    return "complex" if tensor.is_complex() else str(tensor.dtype)


def describe(tensor: torch.Tensor) -> str:
    """Return a tensor's shape and dtype in words."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
