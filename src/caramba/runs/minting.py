"""Making a run directory: once per run, by the front end, after everything is valid."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from caramba import __version__
from caramba.config.manifest import Manifest
from caramba.errors import CarambaError
from caramba.runs.files import write_json, write_whole
from caramba.runs.manifest import MANIFEST, canonical_json, manifest_sha256

PACKAGES = (
    "torch",
    "lightning",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "numpy",
    "safetensors",
    "tokenizers",
    "triton",
)
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


def environment() -> dict[str, Any]:
    """Return the facts of this process and machine that a result depends on, without names of people or hosts."""
    return {
        "caramba": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "host_sha256": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "packages": {name: version for name in PACKAGES if (version := package_version(name)) is not None},
        "git_commit": git_commit(),
    }


def package_version(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """Return the commit of the repository that the current folder is in, or None."""
    text = _git("rev-parse", "HEAD")
    return text.decode().strip() if text else None


def git_patch() -> bytes | None:
    """Return the changes to tracked files since that commit, or None."""
    return _git("diff", "HEAD", "--binary", "--no-color", "--no-ext-diff", "--no-textconv")


def _git(*arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, timeout=20, check=False)
    except (
        OSError,
        subprocess.TimeoutExpired,
    ):  # no git on this machine, or a repository too large to wait for
        return None
    return done.stdout if done.returncode == 0 else None
