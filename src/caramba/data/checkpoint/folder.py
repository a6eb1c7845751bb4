"""The files of folders of weights, Hugging Face's and sharded ones: which hold the weights, and whether they are all
there. No torch."""

import hashlib
import re
import struct
from pathlib import Path

from caramba.config.source import read_object
from caramba.data.checkpoint.header import refuse_pickle
from caramba.errors import CheckpointError

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
GGUF_SUFFIX = ".gguf"
_WEIGHTS = re.compile(r"model(-[0-9]+-of-[0-9]+)?\.safetensors")
# Of a distributed checkpoint, and of a training state of which each rank writes its part.
DCP_METADATA, DCP_LABELS = ".metadata", "caramba.json"
MODEL, LOOP = "model", "loop.pt"

WHOLE_BYTES = 64 * 2**20
SAMPLES, SAMPLE_BYTES = 2048, 4096


def is_gguf(path: Path) -> bool:
    """Whether a path names an existing GGUF file, by its suffix."""
    return path.suffix.lower() == GGUF_SUFFIX and path.is_file()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors files of a model folder: those of its index, or the one file.

    Raises:
        CheckpointError: the folder has no weights, only pickled ones, lacks files of its index, or has weights that
            would not be read.
    """
    files = _named_files(folder)
    stray = [file.name for file in folder.glob("model*.safetensors") if _WEIGHTS.fullmatch(file.name)]
    if unread := sorted({*stray} - {file.name for file in files}):
        # Other libraries read model.safetensors where both are there, and so another model.
        raise CheckpointError(
            f"{folder}: {unread[0]} is not among the {len(files)} files that would be read, {files[0].name} …; remove "
            f"the stale ones of {INDEX}, its files and {SINGLE}"
        )
    return files


def _named_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX
    if index.is_file():
        files = tuple(folder / name for name in sorted(set(read_index(index).values())))
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of the {len(files)} files that {INDEX} names are missing: "
                f"{', '.join(missing[:4])}{' …' if len(missing) > 4 else ''}; download the folder again"
            )
        return files
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    pickled = next(iter(sorted((*folder.glob("*.bin"), *folder.glob("*.pth")))), None)
    if pickled is not None:
        refuse_pickle(pickled)
    raise CheckpointError(
        f"{folder}: has no weights; expected {SINGLE}, or {INDEX} with its files. Download the folder again"
    )


def read_index(index: Path) -> dict[str, str]:
    """Read the weight map of a sharded checkpoint: the file of each tensor.

    Raises:
        CheckpointError: the index is damaged, or names a file outside its folder.
    """
    found = read_object(index, CheckpointError, "download it again").get("weight_map")
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"{index}: damaged, expected JSON with a weight_map of files, found {str(found)[:100]}; download it again"
        )
    for name, file in found.items():
        is_name = isinstance(file, str) and file not in ("", ".", "..") and "\0" not in file
        if not is_name or Path(file).name != file or len(file) > 255:
            raise CheckpointError(
                f"{index}: names {str(file)[:100]!r} for {name[:100]}, which is not a file of the same folder; "
                "download it again"
            )
    return found


def signature(folder: Path) -> str:
    """Return a SHA-256 of a folder's description of its weights: config.json, and the index or the one file's header.

    It changes with the network, the layout and the size of the weights, and is read in no time; it is no hash of the
    weights themselves.

    Raises:
        CheckpointError: as for `weight_files`.
    """
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    for file in weight_files(folder):
        with open(file, "rb") as stream:
            first = stream.read(8)
            length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
            digest.update(first + stream.read(min(length, 100_000_000)))
        digest.update(f"{file.name} {file.stat().st_size}".encode())
    return digest.hexdigest()


def fingerprint(place: Path) -> str:
    """Return a SHA-256 of weights: of a model folder's files, of one file, or of all files of another kind of folder.

    Files of up to 64 MiB are read whole, of larger ones 2048 pieces of 4 KiB, evenly spread: training changes all of a
    matrix, and a run of gigabytes is not to wait for every byte. Names and folders do not count.

    Raises:
        CheckpointError: as for `weight_files`.
    """
    if place.is_file():
        files: tuple[Path, ...] = (place,)
    elif (place / CONFIG).is_file():
        files = weight_files(place)
    else:
        files = tuple(sorted(file for file in place.rglob("*") if file.is_file()))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size} ".encode())
        with open(file, "rb") as stream:
            if size <= WHOLE_BYTES:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
                continue
            for index in range(SAMPLES):
                stream.seek(index * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()


def is_dcp(place: Path) -> bool:
    """Whether `place` is a folder that `write_dcp` wrote."""
    return (place / DCP_METADATA).is_file() and (place / DCP_LABELS).is_file()


def latest_sharded_state(folder: Path) -> Path | None:
    """Return the last step of a folder that was written whole, None where there is none."""
    if not Path(folder).is_dir():
        return None
    whole = sorted(place for place in Path(folder).iterdir() if (place / LOOP).is_file())
    return whole[-1] if whole else None
