"""Run directories: minted once, locked by their worker, read by everyone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from caramba import CallablePackage
from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.runs.files import lock as lock
    from caramba.runs.manifest import MANIFEST as MANIFEST
    from caramba.runs.manifest import canonical_json as canonical_json
    from caramba.runs.manifest import differences as differences
    from caramba.runs.manifest import manifest_sha256 as manifest_sha256
    from caramba.runs.manifest import read_manifest as read_manifest
    from caramba.runs.minting import find_unfinished_run as find_unfinished_run
    from caramba.runs.minting import find_unmeasured_run as find_unmeasured_run
    from caramba.runs.minting import list_runs as list_runs
    from caramba.runs.minting import mint as mint
    from caramba.runs.minting import resolve_run as resolve_run


# Looked up on first use: files and exit codes are needed where pydantic must not be loaded.
__getattr__ = lazy_exports(__name__, __file__)

sys.modules[__name__].__class__ = CallablePackage
