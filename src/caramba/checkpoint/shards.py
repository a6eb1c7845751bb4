"""Safetensors files streamed into a module in place: one file or many, without a copy of the weights in between."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caramba.checkpoint.tensors import described, kind_of, read_header, without_aliases
from caramba.errors import CheckpointError

CHUNK_BYTES = 1 << 20
MOST_READERS = 4
HUGE_PAGE_BYTES = 1 << 21

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its file, the byte at which its data begins, dtype and shape."""

    file: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def stored_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
    """Read the headers of safetensors files and return every tensor's place by name.

    Raises:
        CheckpointError: a file is missing, truncated, corrupt, a pickle, of an unknown dtype, or two hold one name.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        header, data_start = read_header(file)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            tensor = _stored(file, name, entry, data_start)
            if name in found:
                raise CheckpointError(
                    f"{file.parent}: {name} is both in {found[name].file.name} and {file.name}; "
                    "remove stale files and keep one set"
                )
            found[name] = tensor
    return found


def is_same_tensor(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two stored tensors have the same dtype, shape and bytes; reads both in chunks of 1 MB."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open(one.file, "rb") as first, open(other.file, "rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.nbytes
        while left:
            size = min(left, CHUNK_BYTES)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True


def stream_into(
    module: torch.nn.Module,
    tensors: Mapping[str, StoredTensor],
    *,
    where: str,
    names: Mapping[str, str] | None = None,
) -> None:
    """Read stored tensors straight into the parameters and buffers of `module`, all or none.

    Bytes of the module's own dtype are read into its memory; others, and those for an accelerator, pass through a
    buffer of 1 MB per reader. Everything is compared with the module before the first byte is read.

    Args:
        module: on real memory, not meta.
        tensors: by stored name.
        where: what the tensors came from, for the message.
        names: the stored name of each of the module's own, where they differ.

    Raises:
        CheckpointError: names each tensor that is missing, unexpected, or of another shape or kind, with its file.
    """
    own = {
        key: item for key, item in module.state_dict(keep_vars=True).items() if isinstance(item, torch.Tensor)
    }
    _, aliases = without_aliases(own)
    stored_name = {key: (names or {}).get(key, key) for key in own}
    problems: list[str] = []
    jobs: list[tuple[torch.Tensor, StoredTensor]] = []
    used: set[str] = set()
    for key, target in own.items():
        same = [key, aliases.get(key, key), *(alias for alias, kept in aliases.items() if kept == key)]
        name = next((stored_name[item] for item in same if stored_name[item] in tensors), None)
        if name is None:
            problems.append(f"missing {stored_name[key]} {described(target)}")
            continue
        stored = tensors[name]
        used.add(name)
        if stored.shape != target.shape or kind_of(target) != kind_of(torch.empty(0, dtype=stored.dtype)):
            problems.append(f"{name} in {stored.file.name}: expected {described(target)}, found {stored}")
        elif target.is_meta:
            problems.append(f"{name}: the module is on meta, without memory; call to_empty() first")
        elif key not in aliases:
            jobs.append((target, stored))
    problems += [
        f"unexpected {name} {item} in {item.file.name}"
        for name, item in tensors.items()
        if name not in used and name not in {stored_name[key] for key in own}
    ]
    if problems:
        shown = problems[:20]
        more = f"\n  … and {len(problems) - len(shown)} more" if len(problems) > len(shown) else ""
        raise CheckpointError(
            f"{where}: does not fit {type(module).__name__}, {len(problems)} of {len(own)} tensors differ:\n  "
            + "\n  ".join(shown)
            + more
            + "\n  use the description that the checkpoint belongs to, or download it again"
        )
    _read_all(jobs)


def _read_all(jobs: Sequence[tuple[torch.Tensor, StoredTensor]]) -> None:
    # Reading and converting release the interpreter's lock; large tensors first, so that no reader waits at the end.
    order = sorted(jobs, key=lambda job: -job[1].nbytes)
    with ThreadPoolExecutor(max_workers=min(MOST_READERS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda job: _read(*job), order):
            pass


def _read(target: torch.Tensor, stored: StoredTensor) -> None:
    with torch.no_grad(), open(stored.file, "rb", buffering=0) as file:
        file.seek(stored.start)
        data = target.detach()
        if data.device.type == "cpu" and data.dtype == stored.dtype and data.is_contiguous():
            _prefer_huge_pages(data)
            _fill(file, data, stored)
            return
        flat = data.view(-1) if data.is_contiguous() else None
        if flat is None:
            whole = torch.empty(stored.shape, dtype=stored.dtype)
            _fill(file, whole, stored)
            data.copy_(whole)
            return
        step = CHUNK_BYTES // stored.dtype.itemsize
        buffer = torch.empty(min(step, flat.numel()), dtype=stored.dtype)
        for start in range(0, flat.numel(), step):
            part = buffer[: min(step, flat.numel() - start)]
            _fill(file, part, stored)
            flat[start : start + part.numel()].copy_(part)


def _prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask Linux to back a large CPU tensor by pages of 2 MB, a hint that changes speed alone.

    Touching fresh memory in pages of 4 KB takes longer than reading a cached file into it. Tensors that are converted
    while they are read gain nothing: their chunks are small, and a page of 4 KB is still in the cache when written.
    """
    if tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - first
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def _fill(file: Any, tensor: torch.Tensor, stored: StoredTensor) -> None:
    """Read as many bytes as a contiguous CPU tensor has into its memory."""
    left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")  # pyright: ignore[reportArgumentType]
    while left.nbytes:
        count = file.readinto(left)
        if not count:
            raise CheckpointError(f"{stored.file}: the file ended while it was read; copy it again")
        left = left[count:]


def _stored(file: Path, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    dtype = _DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise CheckpointError(
            f"{file}: {name} has dtype {entry['dtype']}; expected one of {', '.join(_DTYPES)} (not quantised weights)"
        )
    start, end = (int(offset) for offset in entry["data_offsets"])
    shape = torch.Size(int(size) for size in entry["shape"])
    if end - start != shape.numel() * dtype.itemsize:
        raise CheckpointError(
            f"{file}: corrupt header: {name} {list(shape)} {entry['dtype']} takes {shape.numel() * dtype.itemsize} "
            f"bytes, its offsets say {end - start}; copy it again"
        )
    return StoredTensor(file, data_start + start, end - start, dtype, shape)
