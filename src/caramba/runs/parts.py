"""Temporary files and folders of writers, next to what they become; those of killed writers are removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_RANDOM = re.compile(r"[a-z0-9_]{8}\.part")


@contextlib.contextmanager
def part_of(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary file, or folder, `.NAME.xxxxxxxx.part` next to `path`; remove what is left of it at the end.

    The writer holds a lock on it, which the kernel drops with the process. Parts of the same name that nobody holds are
    those of killed writers, and are removed first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    part, lock = _make(path, folder)
    while lock is None:  # another writer took it for abandoned before it was locked
        part, lock = _make(path, folder)
    try:
        yield part
    finally:
        os.close(lock)
        _remove(part)


def _make(path: Path, folder: bool) -> tuple[Path, int | None]:
    prefix, suffix = f".{path.name}.", ".part"
    if folder:
        part = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=path.parent))
    else:
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=suffix, dir=path.parent)
        os.close(handle)
        part = Path(name)
    return part, _lock(part)


def _remove_abandoned(path: Path) -> None:
    prefix = f".{path.name}."
    with os.scandir(path.parent) as items:
        names = [item.name for item in items if item.name.startswith(prefix)]
    for name in names:
        if not _RANDOM.fullmatch(name.removeprefix(prefix)):
            continue
        part = path.with_name(name)
        lock = _lock(part)
        if lock is not None:
            _remove(part)
            os.close(lock)


def _lock(part: Path) -> int | None:
    """Lock a part and return the descriptor that holds it; None where another process does, or it is gone."""
    try:
        descriptor = os.open(part, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), os.stat(part))
    except (BlockingIOError, FileNotFoundError):
        is_there = False
    if is_there:
        return descriptor
    os.close(descriptor)
    return None


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)
