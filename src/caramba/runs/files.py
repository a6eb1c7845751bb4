"""Files of runs: written whole, so a reader sees the old file or the new one, and locked by one worker at a time."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from caramba.errors import CarambaError, CheckpointError, ConfigError


def home() -> Path:
    """Return the folder of caches, which can be deleted at any time: `CARAMBA_HOME`, else `./.caramba`."""
    return Path(os.environ.get("CARAMBA_HOME", ".caramba")).absolute()


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, a full quota and a file over the size limit."""
_RANDOM = re.compile(r"[a-z0-9_]{8}\.part")


@contextlib.contextmanager
def named_when_full(path: Path) -> Iterator[None]:
    """Within, a full disk is reported with `path`, which an error of a write to an open file lacks."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL and error.filename is None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """Yield a temporary folder `.NAME.xxxxxxxx.part` next to `path`; remove what is left of it at the end.

    The writer holds a lock on it, which the kernel drops with the process. Parts of the same name without a lock are
    those of killed writers, and are removed first, where the file system has locks.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(NoLocksError):
        _remove_abandoned(path)
    part, lock = _make_part(path), None
    with contextlib.suppress(NoLocksError):
        while (lock := try_lock(part)) is None:  # another writer took it for abandoned before it was locked
            part = _make_part(path)
    try:
        with named_when_full(path):
            yield part
    finally:
        _remove(part)  # while it is locked: else another writer removes it too, as abandoned
        if lock is not None:
            os.close(lock)


def _make_part(path: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))


def _remove_abandoned(path: Path) -> None:
    prefix = f".{path.name}."
    with os.scandir(path.parent) as items:
        names = [item.name for item in items if item.name.startswith(prefix)]
    for name in names:
        if not _RANDOM.fullmatch(name.removeprefix(prefix)):
            continue
        part = path.with_name(name)
        lock = try_lock(part)
        if lock is not None:
            _remove(part)
            os.close(lock)


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is synced and renamed over `path`, on failure removed.

    The sum of an artifact of a run is recorded with the rename.
    """
    # In a folder of its own: safetensors replaces the file that it is given, and a lock on that would be gone. Under
    # another name: what a killed writer leaves is found by nobody who looks for the file.
    with part_of(path) as folder:
        temporary = folder / f"part{path.suffix}"
        temporary.touch()
        yield temporary
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        with recorded(path, temporary):
            os.replace(temporary, path)
            _sync_folder(path.parent)


def write_whole(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` through a temporary file, fsync and rename."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole. NaN and infinity are refused: they are not JSON."""
    write_whole(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Return rows as CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def append_line(file: Path, text: str) -> None:
    """Append a line to a record and sync it, so that it is on disk before anything follows from it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab") as stream:
        stream.write(f"{text}\n".encode())
        stream.flush()
        os.fsync(stream.fileno())


def whole_lines(file: Path) -> list[bytes]:
    """Return the lines of a record. Half a last line, which a kill left, is cut off."""
    if not file.is_file():
        return []
    whole, newline, rest = file.read_bytes().rpartition(b"\n")
    if rest:
        os.truncate(file, len(whole) + len(newline))
    return whole.split(b"\n") if newline else []


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


RECORD = "checksums.json"
_IN_RUN = ("checkpoints", "stages")
_AWAITED = "awaits_rename"
_MAX_RECORD_BYTES = 64 << 20
_MAX_DEPTH = 6  # checkpoints/PHASE.state.pt/STEP/model/FILE
# Smaller files are hashed in less time than the cache of hashes is read.
_CACHED_FROM_BYTES = 4 << 20
_MAX_CACHED = 4096
_hashes: dict[str, str] = {}
"""SHA-256 of files that this process wrote or hashed, by `_stamp`."""
_records: dict[str, dict[str, list[dict[str, Any]]]] = {}
"""Records that this process read, by `_stamp`."""


def find_root(file: Path) -> Path | None:
    """Return the folder whose record covers `file`: its run, its group of a run, or its token folder."""
    file = Path(os.path.abspath(file))
    for place in list(file.parents)[:_MAX_DEPTH]:
        if place.name in _IN_RUN and _is_run(place.parent):
            return place.parent
    return file.parent if has_record(file.parent) else None


def _is_run(folder: Path) -> bool:
    is_group = folder.parent.name == "groups"
    return ((folder.parents[1] if is_group else folder) / "manifest.json").is_file()


@contextlib.contextmanager
def recorded(path: Path, written: Path) -> Iterator[None]:
    """Record the sum of `written` around its rename to `path`, where `path` is an artifact of a run.

    The record has both versions during the rename: a process that is killed then leaves a file that is still accepted,
    or none, where the new version alone is on record.
    """
    root = find_root(path)
    if root is None or path.name == RECORD or root == Path(os.path.abspath(path)).parent:
        yield
        return
    entry = {"bytes": written.stat().st_size, "sha256": sha256_of(written)}
    name = _name(root, path)
    _update(root, name, [*read_record(root).get(name, []), {**entry, _AWAITED: True}])
    yield
    _remember(path, entry["sha256"])
    _update(root, name, [entry])


def remove_recorded(path: Path) -> None:
    """Remove an artifact of a run, and what its record has of it, first: a file on record has to be there."""
    root = find_root(path)
    if root is not None and has_record(root):
        _write(root, {name: item for name, item in read_record(root).items() if name != _name(root, path)})
    path.unlink()


def record_files(root: Path, files: Iterable[Path], known: Mapping[str, str] | None = None) -> None:
    """Record `files` in the folder `root`, and keep what its record has of others.

    Args:
        known: SHA-256 by name within `root`, of files that need no other reading.
    """
    found = dict(read_record(root))
    named = {_name(root, file): file for file in files}
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # hashing frees the interpreter
        digests = pool.map(lambda item: (known or {}).get(item[0]) or sha256_of(item[1]), named.items())
        for (name, file), digest in zip(named.items(), digests, strict=True):
            found[name] = [{"bytes": file.stat().st_size, "sha256": digest}]
            _remember(file, digest)
    _write(root, found)


def check_file(file: Path, error: type[CarambaError] = CheckpointError) -> None:
    """Check the size and SHA-256 of a file against the record; one that is not on record is not checked.

    Raises:
        CarambaError: of type `error`; the file is missing or differs, or the record is damaged.
    """
    root = find_root(file)
    if root is not None:
        _check(root, _name(root, file), error)


def check_folder(root: Path, error: type[CarambaError] = CheckpointError) -> None:
    """Check every file on the record of a folder; one without a record is not checked.

    Raises:
        CarambaError: of type `error`; a file is missing or differs, or the record is damaged.
    """
    for name in read_record(root, error):
        _check(root, name, error)


def check_tree(folder: Path, error: type[CarambaError] = CheckpointError) -> None:
    """Check every file on record below `folder`, which is part of a run.

    Raises:
        CarambaError: of type `error`; a file is missing or differs, or the record is damaged.
    """
    root = find_root(folder / RECORD)
    if root is None:
        return
    prefix = _name(root, folder) + "/"
    for name in read_record(root, error):
        if name.startswith(prefix):
            _check(root, name, error)


def has_record(root: Path) -> bool:
    """Whether a folder has a record of sums, readable or not."""
    return os.path.lexists(root / RECORD)


def read_record(root: Path, error: type[CarambaError] = CheckpointError) -> Mapping[str, list[dict[str, Any]]]:
    """Return the accepted versions (bytes, sha256) of each file by its name within `root`; empty without a record.

    Raises:
        CarambaError: of type `error`; the record is damaged.
    """
    file = root / RECORD
    if not os.path.lexists(file):
        return {}
    if not file.is_file():
        raise error(f"{file}: is no file, expected the record of sums; restore it")
    stamp = _stamp(file)
    if stamp not in _records:
        reason = f"{file.stat().st_size} bytes, expected at most {_MAX_RECORD_BYTES}"
        plain = None
        if file.stat().st_size <= _MAX_RECORD_BYTES:
            content = file.read_bytes()
            try:
                plain = json.loads(content)
                reason = "its own SHA-256 differs"
                files = plain["files"]
                # The text itself is compared, so that no byte of the record can differ.
                plain = files if _text(files).encode() == content else None
            except (ValueError, KeyError, TypeError, RecursionError) as found:
                plain, reason = None, type(found).__name__
        if plain is None:
            raise error(
                f"{file}: damaged ({reason}), expected what was written; restore it, or delete it to open the folder "
                "unchecked"
            )
        _records.clear()
        _records[stamp] = plain
    return _records[stamp]


def _check(root: Path, name: str, error: type[CarambaError]) -> None:
    versions = read_record(root, error).get(name)
    if versions is None:
        return
    file = Path(os.path.normpath(root / name))
    if not file.exists() and all(_AWAITED in version for version in versions):
        return
    if not file.is_file():
        raise error(f"{file}: missing, expected {versions[-1]['bytes']} bytes by {root / RECORD}; restore it")
    size = file.stat().st_size
    sizes = sorted({version["bytes"] for version in versions})
    if size not in sizes:
        kind = "truncated" if size < sizes[0] else "corrupt"
        raise error(f"{file}: the file is {kind}: {size} bytes, expected {sizes[-1]}; restore it or write it again")
    digest = _cached_sha256(file)
    if digest not in [version["sha256"] for version in versions]:
        raise error(
            f"{file}: corrupt or replaced: SHA-256 {digest[:12]}, expected {versions[-1]['sha256'][:12]}; restore it "
            f"or write it again (recorded in {RECORD})"
        )


def _update(root: Path, name: str, versions: list[dict[str, Any]]) -> None:
    kept = {key: value for key, value in read_record(root).items() if (root / key).exists()}
    _write(root, {**kept, name: versions})


def _write(root: Path, files: Mapping[str, Any]) -> None:
    write_whole(root / RECORD, _text(files))


def _text(files: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"files": files, "sha256": digest}, indent=1, sort_keys=True) + "\n"


def _name(root: Path, file: Path) -> str:
    return Path(os.path.relpath(os.path.abspath(file), os.path.abspath(root))).as_posix()


# --- hashes of files that have not changed since


def _stamp(file: Path) -> str:
    """Return what changes with the content: ctime as well as mtime, which a copy or a tool may set back."""
    facts = file.stat()
    return f"{facts.st_dev}-{facts.st_ino}-{facts.st_size}-{facts.st_mtime_ns}-{facts.st_ctime_ns}"


def _cached_sha256(file: Path) -> str:
    stamp = _stamp(file)
    if stamp not in _hashes and file.stat().st_size >= _CACHED_FROM_BYTES:
        _hashes.update(_stored_hashes())
    if stamp not in _hashes:
        _remember(file, sha256_of(file))
    return _hashes[_stamp(file)]


def _remember(file: Path, digest: str) -> None:
    _hashes[_stamp(file)] = digest
    if file.stat().st_size < _CACHED_FROM_BYTES:
        return
    stored = {**_stored_hashes(), _stamp(file): digest}
    # The cache saves time alone: where it cannot be written, files are hashed at each start.
    with contextlib.suppress(OSError):
        write_json(_cache_file(), dict(list(stored.items())[-_MAX_CACHED:]))


def _stored_hashes() -> dict[str, str]:
    """Return the cache of earlier processes, which may be deleted or damaged: the files are hashed again then."""
    try:
        stored = json.loads(_cache_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(key): str(value) for key, value in stored.items()} if isinstance(stored, dict) else {}


def _cache_file() -> Path:
    return home() / RECORD


def remove_parts(folder: Path) -> None:
    """Remove the temporary files of writers that were killed; the caller holds the folder, so that no writer lives."""
    for file in folder.rglob(".*.part"):
        file.unlink() if not file.is_dir() else shutil.rmtree(file)


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
            raise ConfigError(f"{run_dir}: process {holder} is running this {what}; wait for it, or stop it first")
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
