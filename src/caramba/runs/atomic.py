"""Writes through a temporary file, fsync and rename, without a record of the file's sum."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path


def home() -> Path:
    """Return the folder of caches, which can be deleted at any time: `CARAMBA_HOME`, else `./.caramba`."""
    return Path(os.environ.get("CARAMBA_HOME", ".caramba")).absolute()


@contextlib.contextmanager
def atomic_file(
    path: Path, around: Callable[[Path, Path], AbstractContextManager[None]] | None = None
) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is synced and renamed over `path`, on failure removed.

    Args:
        around: makes a context of (path, temporary path) for the rename.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        with contextlib.nullcontext() if around is None else around(path, temporary):
            os.replace(temporary, path)
            _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` whole."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


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
