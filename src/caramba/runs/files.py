"""Files written whole: a reader sees the old file or the new one, never a part, whatever stops the writer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba.runs.checksums import recorded


def home() -> Path:
    """Return the folder of caches, which can be deleted at any time: `CARAMBA_HOME`, else `./.caramba`."""
    return Path(os.environ.get("CARAMBA_HOME", ".caramba")).absolute()


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is synced and renamed over `path`, on failure removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        with recorded(path, temporary):
            os.replace(temporary, path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def remove_parts(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; the caller holds the folder, so that no writer lives."""
    for file in folder.rglob(".*.part"):
        file.unlink() if not file.is_dir() else shutil.rmtree(file)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` through a temporary file, fsync and rename."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole. NaN and infinity are refused: they are not JSON."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
