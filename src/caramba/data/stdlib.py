"""The `stdlib` corpus: the running interpreter's own library source, real text that is present everywhere."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from caramba.errors import DataError

SPLIT_RULE = (
    "val if the first 7 bytes of sha256('split:' + relative path), as a fraction of 2**56, are below val_frac;"
    " documents in order of sha256('order:' + relative path)"
)
_EXCLUDED = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class CorpusFiles:
    """The files of a corpus, split; texts are read when asked for, so the corpus is never whole in memory."""

    root: Path
    train: tuple[str, ...]
    val: tuple[str, ...]
    not_utf8: tuple[str, ...]
    duplicates: int

    def texts(self, split: str) -> Iterator[str]:
        """Yield the text of each file of `train` or `val`, in the corpus order."""
        for name in self.train if split == "train" else self.val:
            # Not read_text: it would turn \r\n into \n and the byte counts would no longer be the files'.
            yield (self.root / name).read_bytes().decode("utf-8")


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_identity() -> dict[str, str]:
    """Return what identifies the corpus without reading it: the interpreter, its version and its path."""
    return {
        "implementation": platform.python_implementation(),
        "python": platform.python_version(),
        "root": str(stdlib_root()),
    }


def collect_documents(root: Path, val_frac: float, max_bytes: int | None = None) -> CorpusFiles:
    """List the distinct UTF-8 .py files under `root` in a fixed shuffled order and split them by file.

    Order and split depend only on relative paths. A file that would cross `max_bytes` is left out. When chance
    leaves a split empty, the file nearest to it is moved there.

    Raises:
        DataError: fewer than two usable files.
    """
    kept: list[str] = []
    not_utf8: list[str] = []
    seen: set[bytes] = set()
    total = duplicates = 0
    for name in sorted(
        _python_files(root), key=lambda name: hashlib.sha256(f"order:{name}".encode()).digest()
    ):
        size = (root / name).stat().st_size
        if size == 0 or (max_bytes is not None and total + size > max_bytes):
            continue
        content = (root / name).read_bytes()
        digest = hashlib.sha256(content).digest()
        if digest in seen:
            duplicates += 1
        elif not _is_utf8(content):
            not_utf8.append(name)
        else:
            seen.add(digest)
            kept.append(name)
            total += size
    if len(kept) < 2:
        limit = "" if max_bytes is None else f" within data.max_bytes={max_bytes}"
        raise DataError(
            f"{root}: {len(kept)} usable .py files{limit}, expected at least 2 (one to train, one held out);"
            + (" raise data.max_bytes" if limit else " use data=tokens data.path=FILE")
        )
    held_out = {name for name in kept if _place(name) < val_frac}
    by_place = sorted(kept, key=_place)
    if not held_out:
        held_out = {by_place[0]}
    elif len(held_out) == len(kept):
        held_out.remove(by_place[-1])
    train = tuple(name for name in kept if name not in held_out)
    return CorpusFiles(root, train, tuple(n for n in kept if n in held_out), tuple(not_utf8), duplicates)


def _python_files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _EXCLUDED]
        for name in files:
            path = Path(folder, name)
            if name.endswith(".py") and path.is_file():
                yield path.relative_to(root).as_posix()


def _place(name: str) -> float:
    """A file's place in [0, 1), independent of its place in the order."""
    return int.from_bytes(hashlib.sha256(f"split:{name}".encode()).digest()[:7], "big") / 2**56


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
