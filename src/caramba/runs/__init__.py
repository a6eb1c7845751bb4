"""Run directories: minted once, locked by their worker, read by everyone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from caramba import CallablePackage
from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.runs.environment import environment, git_commit
    from caramba.runs.find import find_unfinished_run, find_unmeasured_run, list_runs, resolve_run
    from caramba.runs.locking import lock
    from caramba.runs.manifest import MANIFEST, canonical_json, differences, manifest_sha256, read_manifest
    from caramba.runs.minting import mint

__all__ = [
    "MANIFEST",
    "canonical_json",
    "differences",
    "environment",
    "find_unfinished_run",
    "find_unmeasured_run",
    "git_commit",
    "list_runs",
    "lock",
    "manifest_sha256",
    "mint",
    "read_manifest",
    "resolve_run",
]

# Looked up on first use: files and exit codes are needed where pydantic must not be loaded.
__getattr__ = lazy_exports(
    __name__,
    {
        "find": ("list_runs", "resolve_run", "find_unfinished_run", "find_unmeasured_run"),
        "locking": ("lock",),
        "manifest": ("MANIFEST", "canonical_json", "differences", "manifest_sha256", "read_manifest"),
        "environment": ("environment", "git_commit"),
        "minting": ("mint",),
    },
)

sys.modules[__name__].__class__ = CallablePackage
