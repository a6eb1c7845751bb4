"""Headers of safetensors files, read and checked without torch; pickled weight files, which run code, are refused."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from caramba.config.source import parse_object
from caramba.errors import CheckpointError
from caramba.runs.files import check_file

_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle"})
_PICKLE_STARTS = (b"PK\x03\x04", *(bytes([0x80, protocol]) for protocol in (2, 3, 4, 5)))


def refuse_pickle(path: Path) -> None:
    """Raise if `path` is a pickle by its suffix or by its first bytes (or torch's zip of one).

    Raises:
        CheckpointError: the reason, and how to convert the file.
    """
    with open(path, "rb") as file:
        first = file.read(8)
    # A safetensors file starts with a header length below 2**27, so its bytes 4 to 7 are zero; a pickle's are not.
    is_pickle = first.startswith(_PICKLE_STARTS) and first[4:8] != bytes(4)
    if is_pickle or path.suffix.lower() in _SUFFIXES:
        raise CheckpointError(
            f"{path}: a pickled checkpoint, and pickles run code when they are loaded; expected safetensors. Use the"
            " .safetensors file of the same model, or convert one that you trust:"
            f" safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), 'model.safetensors')"
        )


_MAX_DIMENSIONS = 64
_MAX_HEADER_BYTES = 16 << 20  # about 150,000 tensors


def read_metadata(path: Path) -> dict[str, str]:
    """Read the text metadata of a safetensors file without reading its tensors.

    Raises:
        CheckpointError: as for `load_tensors`.
    """
    return dict(read_header(Path(path))[0].get("__metadata__", {}))


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a safetensors file's header and the byte at which its data begins, once its size fits the header.

    Raises:
        CheckpointError: the file is missing, truncated, corrupt, or a pickle.
    """
    if path.is_dir():
        raise CheckpointError(f"{path}: is a folder; expected a .safetensors file")
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such checkpoint file")
    check_file(path)
    refuse_pickle(path)
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(8)
        if len(first) < 8:
            raise CheckpointError(f"{path}: the file is truncated: {size} bytes, a safetensors file has at least 8")
        (length,) = struct.unpack("<Q", first)
        if length > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: not a safetensors file: its first 8 bytes announce a header of"
                f" {length} bytes, the file has {size}"
            )
        if size < 8 + length:
            raise CheckpointError(
                f"{path}: the file is truncated: {size} bytes, its header alone needs {8 + length}; copy it again"
            )
        header = parse_object(
            file.read(length),
            f"{path}: corrupt header in a file of {size} bytes",
            CheckpointError,
            "copy it again",
        )
    expected = 8 + length + _data_bytes(path, header)
    if size != expected:
        kind = "truncated" if size < expected else "corrupt"
        raise CheckpointError(
            f"{path}: the file is {kind}: {size} bytes, its header states {expected}; copy it again or use an"
            " earlier checkpoint"
        )
    return header, 8 + length


def _data_bytes(path: Path, header: Mapping[str, Any]) -> int:
    """Return the bytes of data that a header announces.

    Raises:
        CheckpointError: an entry is malformed, or the tensors overlap or leave holes.
    """
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(
            f"{path}: corrupt header: __metadata__ holds {str(metadata)[:100]}, expected text by name; copy it again"
        )
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        found = entry if isinstance(entry, dict) else {}
        dtype, shape, span = found.get("dtype"), found.get("shape"), found.get("data_offsets")
        if (
            not isinstance(dtype, str)
            or not _are_sizes(shape)
            or not _are_sizes(span)
            or len(span) != 2
            or len(shape) > _MAX_DIMENSIONS
        ):
            raise CheckpointError(
                f"{path}: corrupt header: {name[:100]} is {str(entry)[:100]}, expected dtype, shape and data_offsets; "
                "copy it again"
            )
        spans.append((span[0], span[1], name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end or stop < start:
            raise CheckpointError(
                f"{path}: corrupt header: {name[:100]} has bytes {start} to {stop}, expected them to begin at {end}; "
                "copy it again"
            )
        end = stop
    return end


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
