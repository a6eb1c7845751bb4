"""Safetensors files streamed into a module in place: one file or many, without a copy of the weights in between."""

import ctypes
import math
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from caramba.data.checkpoint.header import read_header
from caramba.data.checkpoint.tensors import describe, kind_of, without_aliases
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
    """The place of a tensor: its file, the byte at which its data begins, dtype and shape."""

    file: Path
    start: int
    nbytes: int
    dtype: torch.dtype
    shape: torch.Size

    def __str__(self) -> str:
        return f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def index_tensors(files: Sequence[Path]) -> dict[str, StoredTensor]:
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


class StoredWeights(Mapping[str, torch.Tensor]):
    """The tensors of safetensors files by name, read when asked for and kept by the caller alone.

    Floating tensors are returned in float32, as `stream_into` leaves them in a module.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], where: str) -> None:
        self._tensors = tensors
        self._where = where

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def read(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor, of `dtype` if it is a floating one, converted while it is read.

        Raises:
            CheckpointError: values that are not finite, in the file or in `dtype`.
        """
        stored = self._tensors[name]
        found = torch.empty(stored.shape, dtype=dtype if stored.dtype.is_floating_point else stored.dtype)
        if count := _read(found, stored):
            raise CheckpointError(
                f"{self._where}: {name} holds {count:,} values that are not finite; the file is damaged, write or "
                "download it again"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


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
    jobs = match_stored(module, tensors, where=where, names=names)
    if bad := _read_all(jobs):
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise CheckpointError(
            f"{where}: values that are not finite in {', '.join(bad[:4])}{more}; the files are damaged, or were cast "
            "to a type that their values overflow: download or convert them again"
        )


def match_stored(
    module: torch.nn.Module,
    tensors: Mapping[str, StoredTensor],
    *,
    where: str,
    names: Mapping[str, str] | None = None,
    allows_meta: bool = False,
) -> list[tuple[str, torch.Tensor, StoredTensor]]:
    """Compare stored tensors with those of `module`; return name, tensor of the module and stored one of each.

    Raises:
        CheckpointError: names each tensor that is missing, unexpected, or of another shape or kind, with its file.
    """
    own = {key: item for key, item in module.state_dict(keep_vars=True).items() if isinstance(item, torch.Tensor)}
    _, aliases = without_aliases(own)
    stored_name = {key: (names or {}).get(key, key) for key in own}
    problems: list[str] = []
    jobs: list[tuple[str, torch.Tensor, StoredTensor]] = []
    used: set[str] = set()
    for key, target in own.items():
        same = [key, aliases.get(key, key), *(alias for alias, kept in aliases.items() if kept == key)]
        name = next((stored_name[item] for item in same if stored_name[item] in tensors), None)
        if name is None:
            problems.append(f"missing {stored_name[key]} {describe(target)}")
            continue
        stored = tensors[name]
        used.add(name)
        if stored.shape != target.shape or kind_of(target) != kind_of(torch.empty(0, dtype=stored.dtype)):
            problems.append(f"{name} in {stored.file.name}: expected {describe(target)}, found {stored}")
        elif target.is_meta and not allows_meta:
            problems.append(f"{name}: the module is on meta, without memory; call to_empty() first")
        elif key not in aliases:
            jobs.append((name, target, stored))
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
    return jobs


def _read_all(jobs: Sequence[tuple[str, torch.Tensor, StoredTensor]]) -> list[str]:
    """Read tensors into place; return those of parameters with values that are not finite, with their counts."""
    # Reading and converting release the interpreter's lock; large tensors first, so that no reader waits at the end.
    order = sorted(jobs, key=lambda job: -job[2].nbytes)
    with ThreadPoolExecutor(max_workers=min(MOST_READERS, os.cpu_count() or 1)) as pool:
        counts = list(pool.map(lambda job: _read(*job[1:]), order))
    return [
        f"{stored.file.name}: {name} ({count:,} of {target.numel():,} values)"
        for (name, target, stored), count in zip(order, counts, strict=True)
        if count and isinstance(target, torch.nn.Parameter)
    ]


def _count_not_finite(part: torch.Tensor) -> int:
    """Count values of a CPU tensor that are not finite: a finite sum has none, and costs 20 us a MB."""
    if not part.is_floating_point() or not part.numel() or math.isfinite(float(part.sum())):
        return 0
    return part.numel() - int(part.isfinite().sum())


def _read(target: torch.Tensor, stored: StoredTensor) -> int:
    """Read a tensor into place; return how many of its values are not finite."""
    with torch.no_grad(), open(stored.file, "rb", buffering=0) as file:
        file.seek(stored.start)
        data = target.detach()
        if data.device.type == "cpu" and data.dtype == stored.dtype and data.is_contiguous():
            _prefer_huge_pages(data)
            _fill(file, data, stored)
            return _count_not_finite(data)
        flat = data.view(-1) if data.is_contiguous() else None
        if flat is None:
            whole = torch.empty(stored.shape, dtype=stored.dtype)
            _fill(file, whole, stored)
            data.copy_(whole)
            return _count_not_finite(whole)
        count = 0
        step = CHUNK_BYTES // stored.dtype.itemsize
        buffer = torch.empty(min(step, flat.numel()), dtype=stored.dtype)
        for start in range(0, flat.numel(), step):
            part = buffer[: min(step, flat.numel() - start)]
            _fill(file, part, stored)
            place = flat[start : start + part.numel()]
            place.copy_(part)
            # Of what is in the cache and float32, where that is on the CPU.
            count += _count_not_finite(place if place.device.type == "cpu" else part)
        return count


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
    left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy()).cast("B")  # pyright: ignore[reportArgumentType]
    while left.nbytes:
        count = file.readinto(left)
        if not count:
            raise CheckpointError(f"{stored.file}: the file ended while it was read; copy it again")
        left = left[count:]


def _stored(file: Path, name: str, entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(
            f"{file}: {name[:100]} has dtype {entry['dtype'][:100]}; expected one of "
            f"{', '.join(_DTYPES)} (not quantised weights)"
        )
    start, end = entry["data_offsets"]
    nbytes = math.prod(entry["shape"]) * dtype.itemsize  # torch.Size would overflow
    if end - start != nbytes:
        raise CheckpointError(
            f"{file}: corrupt header: {name[:100]} {str(entry['shape'])[:100]} {entry['dtype']} takes {nbytes} bytes, "
            f"its offsets say {end - start}; copy it again"
        )
    return StoredTensor(file, data_start + start, end - start, dtype, torch.Size(entry["shape"]))
