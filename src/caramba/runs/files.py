"""Files written whole: a reader sees the old file or the new one, never a part, whatever stops the writer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba.runs.atomic import atomic_file, home
from caramba.runs.checksums import recorded

__all__ = ["home", "remove_parts", "sha256_of", "whole_file", "write_json", "write_whole"]


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is synced and renamed over `path`, on failure removed.

    The sum of an artifact of a run is recorded with the rename.
    """
    with atomic_file(path, recorded) as temporary:
        yield temporary


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
