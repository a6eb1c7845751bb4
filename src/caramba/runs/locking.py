"""One worker per run directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from caramba.errors import ConfigError

LOCK = ".lock"
# A process that checks whether a run is locked holds the lock for a moment: a worker tries again before it gives up.
_ATTEMPTS, _PAUSE_S = 10, 0.02

MOST_STARTING = 256

_held: set[int] = set()
_starting: dict[Path, int] = {}


def is_locked(run_dir: Path) -> bool:
    """Return whether a worker holds a run directory now."""
    if not (run_dir / LOCK).exists():
        return False
    with open(run_dir / LOCK) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def holder_of(run_dir: Path) -> int | None:
    """Return the process that holds a run directory, None where none does or its number is not there yet."""
    if not is_locked(run_dir):
        return None
    text = (run_dir / LOCK).read_text(encoding="utf-8").strip()
    return int(text) if text.isdigit() else None


class NoLocksError(OSError):
    """The file system has no locks, as NFS servers without a lock manager do not."""


def try_lock(path: Path) -> int | None:
    """Lock a file or folder itself and return the descriptor that holds the lock.

    None: another process holds it, or it is gone.

    Raises:
        NoLocksError: the file system has no locks.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_ours = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        is_ours = False
    except OSError as error:
        os.close(descriptor)
        raise NoLocksError(*error.args) from error
    if is_ours:
        return descriptor
    os.close(descriptor)
    return None


def mark_starting(folder: Path) -> bool:
    """Mark a folder as this process's until a worker locks it; False if another process did.

    The lock is that of the folder itself, so that no file is left in it. A file system without locks has no marks.
    """
    try:
        descriptor = try_lock(folder)
    except NoLocksError:
        return True
    if descriptor is None:
        return False
    # A sweep may make thousands of folders, and its worker locks each long before it makes so many others.
    while len(_starting) >= MOST_STARTING:
        drop_mark(next(iter(_starting)))
    _starting[folder] = descriptor
    return True


def marks_of(folder: Path) -> tuple[int, ...]:
    """Return the descriptors by which a child process that inherits them keeps the mark when this process is killed."""
    return (_starting[folder],) if folder in _starting else ()


def drop_mark(folder: Path) -> None:
    """Give up the mark of a folder that this process removed or no longer starts."""
    descriptor = _starting.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


@contextlib.contextmanager
def lock(run_dir: Path, what: str = "run") -> Iterator[None]:
    """Hold the directory of a run, or of a `what`.

    The kernel drops the lock with the process, so a killed worker leaves nothing to clean.

    Raises:
        ConfigError: another process holds it; its number is in the message.
    """
    descriptor = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _taken(descriptor):
            holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
            raise ConfigError(
                f"{run_dir}: process {holder} is running this {what}; wait for it, or stop it first"
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _taken(descriptor: int) -> bool:
    for attempt in range(_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PAUSE_S if attempt + 1 < _ATTEMPTS else 0)
        else:
            return True
    return False


def _let_go() -> None:
    """Close what a forked process inherits: a loader's worker that outlives its killed parent would hold the run."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
