"""Run directories: minted once, locked by their worker, read by everyone."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from caramba import CallablePackage

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

# Looked up on first use: files and ending are needed where pydantic must not be loaded.
_HOMES = {
    **dict.fromkeys(("list_runs", "resolve_run", "find_unfinished_run", "find_unmeasured_run"), "find"),
    **dict.fromkeys(("lock",), "locking"),
    **dict.fromkeys(
        ("MANIFEST", "canonical_json", "differences", "manifest_sha256", "read_manifest"), "manifest"
    ),
    **dict.fromkeys(("environment", "git_commit"), "environment"),
    **dict.fromkeys(("mint",), "minting"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


sys.modules[__name__].__class__ = CallablePackage
