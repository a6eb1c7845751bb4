"""One launch: freeze the manifest, check what it needs, make the run directory, hand the file to the launcher."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.errors import ConfigError
from caramba.launch.argv import Request
from caramba.launch.freeze import Frozen, freeze
from caramba.launch.preflight import check_extras, check_weights
from caramba.runs import MANIFEST, differences, mint, read_manifest, resolve_run, unfinished_run

MISTAKE = 2


def launch(request: Request) -> int:
    """Compose, validate, make or find the run directory, run, and return the exit status."""
    manifest, frozen = prepare(request.overrides, request.config_dirs)
    return start(manifest, frozen.overrides, request)


def prepare(overrides: list[str], config_dirs: list[Path]) -> tuple[Manifest, Frozen]:
    """Return a manifest that can run as it stands: valid, with weights at hand, and nothing in it unbuilt."""
    frozen = freeze(overrides, config_dirs)
    manifest = check_weights(frozen.manifest)
    frozen.check_vocabulary()
    frozen.refuse_unbuilt()
    check_extras(manifest)
    return manifest, frozen


def start(manifest: Manifest, overrides: tuple[str, ...], request: Request) -> int:
    """Write the manifest into a run directory, new or resumed, and start the worker on that file."""
    is_new = False
    if manifest.resume not in ("auto", "never"):
        run_dir = _matching_run(manifest)
    elif manifest.resume == "auto" and (unfinished := unfinished_run(manifest)) is not None:
        run_dir = unfinished
        print(f"going on with {run_dir}, which did not finish (resume=never starts anew)", file=sys.stderr)
    else:
        run_dir, is_new = mint(manifest, overrides), True
    flags = [
        flag for flag, is_set in (("--debug", request.is_debug), ("--quiet", request.is_quiet)) if is_set
    ]
    status = run_inline(run_dir / MANIFEST, flags)
    if is_new and status == MISTAKE and not (run_dir / "plan.json").exists():
        shutil.rmtree(run_dir)  # the data or the device did not fit: there is nothing to go on with
    return status


def run_inline(manifest_file: Path, flags: list[str]) -> int:
    """The inline launcher: the worker in this process. The file is all that is handed over."""
    from caramba import worker

    return worker.main([str(manifest_file), *flags])


def _matching_run(manifest: Manifest) -> Path:
    """Return the run that `resume=PATH` names when it was started from this same manifest."""
    run_dir = resolve_run(manifest.resume)
    stored = read_manifest(run_dir)
    ours, theirs = (json.loads(item.model_dump_json(exclude={"resume"})) for item in (manifest, stored))
    changed = list(differences(theirs, ours))
    if changed:
        shown = "\n  ".join(changed[:10])
        more = f"\n  … and {len(changed) - 10} more" if len(changed) > 10 else ""
        raise ConfigError(
            f"resume={manifest.resume}: that run was started from another manifest:\n  {shown}{more}\n"
            f"Go on with it unchanged (caramba resume {run_dir}), or leave out resume= to start a new run"
        )
    print(f"resuming {run_dir}", file=sys.stderr)
    return run_dir
