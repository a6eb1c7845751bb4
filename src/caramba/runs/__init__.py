"""Run directories: minted once, locked by their worker, read by everyone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from caramba import CallablePackage
from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.runs.environment import environment, git_commit
    from caramba.runs.files import lock
    from caramba.runs.manifest import MANIFEST, canonical_json, differences, manifest_sha256, read_manifest
    from caramba.runs.minting import find_unfinished_run, find_unmeasured_run, list_runs, mint, resolve_run

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
__getattr__ = lazy_exports(__name__, __file__)

sys.modules[__name__].__class__ = CallablePackage
