"""Making a run directory: once per run, by the front end, after everything is valid."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Iterable
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.errors import CarambaError
from caramba.runs.environment import environment, git_patch
from caramba.runs.files import write_json, write_whole
from caramba.runs.manifest import MANIFEST, canonical_json, manifest_sha256

MOST_COLLISIONS = 1000


def mint(manifest: Manifest, overrides: Iterable[str], root: Path = Path("runs")) -> Path:
    """Create `root/<name>/<UTC time>-<manifest hash 8>/` and write what the run starts from.

    The directory holds manifest.json, overrides.txt, env.json, and git.patch when the current folder is a git
    repository with changes. The manifest is written last: a directory that has one is complete.

    Raises:
        CarambaError: the folder cannot be written.
    """
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    parent = (root / manifest.name).absolute()
    base = f"{stamp}-{manifest_sha256(manifest)[:8]}"
    run_dir: Path | None = None
    try:
        run_dir = _reserve(parent, base)
        patch = git_patch()
        write_whole(run_dir / "overrides.txt", "".join(f"{word}\n" for word in overrides))
        write_json(run_dir / "env.json", environment())
        if patch:
            write_whole(run_dir / "git.patch", patch)
        write_whole(run_dir / MANIFEST, canonical_json(manifest))
    except BaseException as error:
        if run_dir is not None:
            shutil.rmtree(run_dir, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise CarambaError(
            f"{parent}: cannot make a run directory: {error.strerror}; free space, or start from another folder"
        ) from None
    return run_dir


def _reserve(parent: Path, base: str) -> Path:
    """Make the first free of base, base-2, base-3 …; mkdir is atomic, so two processes never share one."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, MOST_COLLISIONS):
        run_dir = parent / (base if number == 1 else f"{base}-{number}")
        try:
            run_dir.mkdir()
        except FileExistsError:
            continue
        return run_dir
    raise CarambaError(
        f"{parent}/{base}: {MOST_COLLISIONS} runs of this second exist; something starts runs in a loop"
    )
