"""A finished run as caramba's own writers leave it: a frozen manifest and the artifacts of a small upcycle."""

from __future__ import annotations

import base64
import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Any
from unittest.mock import patch

from caramba.artifacts import style, write
from caramba.config.manifest import Manifest
from caramba.launch.freeze import freeze
from caramba.result import RunResult
from caramba.runs.files import write_json, write_whole
from caramba.runs.manifest import canonical_json, manifest_sha256

SAMPLE = Path(__file__).parents[1] / "artifacts" / "sample_run.py"
PROXY = "teacher, pretrained here for 300 steps"
# A picture of one pixel, which LaTeX can include: drawing takes seconds and is what the artifact tests test.
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")

_frozen = functools.cache(lambda overrides: freeze(["experiment=smoke", *overrides]).manifest)


def sample_result() -> RunResult:
    """The run that the artifact tests write, whose module lies beside them."""
    spec = importlib.util.spec_from_file_location("caramba_sample_run", SAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_result()


def write_run(run_dir: Path, *, labels: dict[str, Any] | None = None, overrides: tuple[str, ...] = ()) -> Manifest:
    """Write manifest.json and artifacts/ of a finished run; its teacher is a proxy unless `labels` says otherwise."""
    manifest = _frozen(overrides)
    write_whole(run_dir / "manifest.json", canonical_json(manifest))
    result = dataclasses.replace(
        sample_result(),
        name=manifest.name,
        run_id=run_dir.name,
        manifest_sha256=manifest_sha256(manifest),
        labels={"proxy": PROXY} if labels is None else labels,
    )
    with patch.object(style, "_saved", lambda figure, form, metadata: PIXEL):
        write(result, run_dir)
    write_json(run_dir / "result.json", {"status": "finished"})
    return manifest
